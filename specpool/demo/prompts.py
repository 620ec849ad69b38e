"""The demo's questions and SmolLM2's chat template.

Prompt lookup drafts what was already said: it pays where an answer repeats its question (code,
copy, tense), and hardly where it does not (sky, story).
"""

from __future__ import annotations

_CODE = '''Add a function that returns the diagonal, and show the whole file:

```python
def area(width, height):
    """Return the area of a rectangle."""
    return width * height

def perimeter(width, height):
    """Return the perimeter of a rectangle."""
    return 2 * (width + height)
```
'''

_TEXT = (
    "The lighthouse stood on the last rock of the coast. Every evening the keeper climbed its "
    "stairs and lit the lamp. Every morning he climbed the stairs and put it out. In between he "
    "wrote down the ships that passed."
)

PROMPTS = {
    "code": _CODE,
    "copy": f"Copy the text below and add one sentence at its end.\n\n{_TEXT}",
    "tense": f"Rewrite this text in the present tense:\n\n{_TEXT}",
    "sky": "Why is the sky blue?",
    "story": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
}


def chat(question: str) -> str:
    """`question` in SmolLM2's chat template, up to where the answer begins."""
    return (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )

"""The demo's questions and SmolLM2's chat template.

Prompt lookup drafts what was already said, so it pays on the code question, whose answer repeats
its question, and hardly on the story.
"""

from __future__ import annotations

_CODE = '''Write this Python code again, unchanged:

```python
def area(width, height):
    """Return the area of a rectangle."""
    return width * height

def perimeter(width, height):
    """Return the perimeter of a rectangle."""
    return 2 * (width + height)
```
'''

PROMPTS = {
    "code": _CODE,
    "facts": "Why is the sky blue?",
    "list": "List the planets of the solar system in order, one on a line, each with one fact.",
    "story": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "sums": "If 3 pencils cost 45 cents, what do 12 pencils cost? Explain step by step.",
}


def chat(question: str) -> str:
    """`question` in SmolLM2's chat template, up to where the answer begins."""
    return (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )

"""Byte-level BPE: every text comes back, numbers stand alone, special tokens are whole."""

from hypothesis import given
from hypothesis import strategies as st

from specpool.demo.tokenizer import Tokenizer
from tests.demo.tiny import BYTES


def with_merges(*merges, special=()):
    joined = [merge.replace(" ", "") for merge in merges]
    tokens = [*BYTES, *joined, *special]
    return Tokenizer(tokens, list(merges), {tokens.index(name) for name in special})


def pieces(tokenizer, text):
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


@given(st.text())
def test_any_text_comes_back(text):
    tokenizer = with_merges("a b", "Ġ a", "ab c", "Ã ©", special=["<|x|>"])
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_go_by_priority_not_by_place():
    assert pieces(with_merges("b c", "a b"), "abc") == ["a", "bc"]
    assert pieces(with_merges("a b", "b c"), "abc") == ["ab", "c"]
    assert pieces(with_merges("a a"), "aaaaa") == ["aa", "aa", "a"]


def test_a_space_belongs_to_the_word_behind_it():
    assert pieces(with_merges("Ġ a", "a Ġ"), "a a") == ["a", " a"]


def test_numbers_stand_alone():
    tokenizer = with_merges("1 2", "Ġ 1", "2 a")
    assert pieces(tokenizer, "12a 1") == ["1", "2", "a", " ", "1"]
    # Not only ASCII digits: U+0664 and U+00BD are numbers too, and two bytes each here.
    half = with_merges("Â ½", "a Â")
    assert pieces(half, "a½a") == ["a", "½", "a"]


def test_letters_of_any_script_are_words():
    assert pieces(with_merges("Ã ©", "t Ã", "é x"), "té") == ["t", "é"]
    assert pieces(with_merges("s !"), "s!") == ["s", "!"]


def test_special_tokens_are_matched_whole_and_the_longest_first():
    tokenizer = with_merges("< |", special=["<|a|>", "<|a|>b"])
    assert tokenizer.encode("<|a|>bx") == [258, BYTES.index("x")]
    assert tokenizer.encode("x<|a|>") == [BYTES.index("x"), 257]
    assert tokenizer.decode([257, 256]) == "<|a|><|"


def test_no_special_tokens_at_all():
    assert with_merges().encode("a|") == [BYTES.index("a"), BYTES.index("|")]


def test_a_broken_character_is_shown_as_such():
    tokenizer = with_merges()
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"
    assert tokenizer.token_bytes(tokenizer.encode("é")[0]) == "é".encode()[:1]

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from muster.engine.text import StopStrings, TextStream


def byte_level():
    """Every byte is a token, and some pairs of bytes that cut characters in odd places are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    text = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("é漢😀 the")
    symbols = "".join(piece for piece, _ in text)
    merges = [(symbols[index], symbols[index + 1]) for index in range(0, len(symbols) - 1, 2)]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def sentencepiece():
    """Words with a leading space mark, and bytes for the rest."""
    words = ["▁the", "▁cat", "▁", "s", "a", "."]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    replace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence(
        [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()


def bytes_of(text):
    return list(text.encode())


def stream_all(tokenizer, tokens, context=(), stop=()):
    """The pieces of text that came out, the stop string, and how many tokens that took."""
    stream = TextStream(lambda ids: tokenizer.decode(list(ids)), context, stop)
    pieces = []
    for count, token in enumerate(tokens, 1):
        before = len(stream.text)
        hit = stream.push(token)
        pieces.append(stream.text[before:])
        if hit:
            return pieces, hit, count
    before = len(stream.text)
    hit = stream.close()
    return [*pieces, stream.text[before:]], hit, len(tokens)


BYTE_LEVEL_TOKENS = st.one_of(
    st.text(alphabet="aé漢😀\u200d the", max_size=20).map(lambda text: BYTE_LEVEL.encode(text).ids),
    st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40),
)
SENTENCEPIECE_TOKENS = st.lists(
    st.one_of(
        st.integers(256, SENTENCEPIECE.get_vocab_size() - 1).map(lambda token: [token]),
        st.sampled_from("é漢😀").map(bytes_of),
    ),
    max_size=30,
).map(lambda parts: [token for part in parts for token in part])


@settings(max_examples=300, deadline=None)
@given(tokens=BYTE_LEVEL_TOKENS)
def test_byte_level_text_equals_the_decoding_of_all_tokens(tokens):
    pieces, _, _ = stream_all(BYTE_LEVEL, tokens)
    assert "".join(pieces) == BYTE_LEVEL.decode(tokens)


@settings(max_examples=300, deadline=None)
@given(context=SENTENCEPIECE_TOKENS.filter(bool), tokens=SENTENCEPIECE_TOKENS)
def test_sentencepiece_text_continues_the_prompt(context, tokens):
    pieces, _, _ = stream_all(SENTENCEPIECE, tokens, context)
    assert SENTENCEPIECE.decode(context) + "".join(pieces) == SENTENCEPIECE.decode(context + tokens)


def test_a_character_split_over_tokens_comes_out_whole_and_at_once():
    for text in ("é", "漢", "😀"):
        pieces, _, _ = stream_all(SENTENCEPIECE, bytes_of(text))
        assert pieces == [""] * (len(bytes_of(text)) - 1) + [text, ""]


def test_a_prompt_that_ends_inside_a_character_is_completed():
    first, *rest = bytes_of("漢")
    pieces, _, _ = stream_all(SENTENCEPIECE, rest, [256, first])
    assert "".join(pieces) == "漢"


def test_a_long_run_of_split_characters_keeps_coming_out():
    pieces, _, _ = stream_all(SENTENCEPIECE, bytes_of("漢" * 50))
    assert pieces == ["", "", "漢"] * 50 + [""]


def test_bytes_that_never_become_a_character_come_out_at_the_end():
    pieces, _, _ = stream_all(BYTE_LEVEL, BYTE_LEVEL.encode("a").ids + BYTE_LEVEL.encode("漢").ids[:1])
    assert pieces == ["a", "", "\ufffd"]


def test_a_space_survives_special_tokens_in_the_middle():
    the, cat, eos = 256, 257, SENTENCEPIECE.token_to_id("<eos>")
    pieces, _, _ = stream_all(SENTENCEPIECE, [the, *[eos] * 40, cat])
    assert "".join(pieces) == "the cat"


def test_a_long_run_of_special_tokens_does_not_make_every_token_dearer():
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return SENTENCEPIECE.decode(list(ids))

    stream = TextStream(decode, [256])
    for token in [257, *[SENTENCEPIECE.token_to_id("<eos>")] * 200, 256, *bytes_of("漢" * 100)]:
        stream.push(token)
    assert stream.text == " cat the" + "漢" * 100
    assert max(lengths) < 40


@settings(max_examples=100, deadline=None)
@given(tokens=BYTE_LEVEL_TOKENS, more=BYTE_LEVEL_TOKENS)
def test_a_replayed_stream_goes_on_as_the_original(tokens, more):
    streams = [TextStream(lambda ids: BYTE_LEVEL.decode(list(ids)), [65], ["ab"]) for _ in range(2)]
    for token in tokens:
        streams[0].push(token)
    streams[1].push(66)
    streams[1] = streams[1].replay(tokens)
    assert [[stream.push(token) for token in more] for stream in streams[:1]] == [
        [stream.push(token) for token in more] for stream in streams[1:]
    ]
    assert streams[0].text == streams[1].text


def test_without_a_tokenizer_the_text_stays_empty():
    stream = TextStream(None, [1, 2])
    assert stream.push(3) is None
    assert stream.close() is None
    assert stream.text == ""


def first_stop(text, stops):
    """Slow and plain: the first character at which some stop string is complete, the longest one there."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=14),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher, out, hit = StopStrings(stops), "", None
    expected = first_stop(text, stops)
    for piece in pieces:
        fresh, hit = matcher.push(piece)
        out += fresh
        assert expected[0].startswith(out), "a part of a stop string came out"
        if hit:
            break
    out += matcher.close()
    assert (out, hit) == expected


@pytest.mark.parametrize(("fed", "held"), [("x<", "<"), ("x<e", "<e"), ("x<<", "<"), ("x<ex", ""), ("<end", "<end")])
def test_exactly_the_longest_possible_beginning_of_a_stop_string_is_held_back(fed, held):
    matcher = StopStrings(["<end>", "<e>nd"])
    out, hit = matcher.push(fed)
    assert hit is None
    assert out + held == fed
    assert matcher.close() == held


@settings(max_examples=300, deadline=None)
@given(tokens=BYTE_LEVEL_TOKENS, stop=st.text(alphabet="aé漢 the", min_size=1, max_size=3))
def test_stop_strings_are_found_across_tokens_and_inside_split_characters(tokens, stop):
    pieces, hit, _ = stream_all(BYTE_LEVEL, tokens, stop=[stop])
    assert ("".join(pieces), hit) == first_stop(BYTE_LEVEL.decode(tokens), [stop])

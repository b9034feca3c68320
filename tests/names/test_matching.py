"""The law of the index: it answers exactly what `re.search` in a loop answers."""

import re

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from shardax.errors import RuleError
from shardax.names import matching
from shardax.names.matching import Matcher, matcher_of
from shardax.names.paths import assign, flatten
from shardax.names.regex import Needle


def naive(patterns, path):
    """The definition: positions of all patterns that `re.search` finds."""
    try:
        return [place for place, pattern in enumerate(patterns) if re.search(pattern, path)]
    except SystemError:  # a bug of CPython 3.11: possessive quantifiers over groups break its own bookkeeping
        reject()


def check(patterns, paths):
    matcher = Matcher(patterns)
    expected = [naive(patterns, path) for path in paths]
    assert [matcher.every(path) for path in paths] == expected
    assert matcher.first_of(paths) == [found[0] if found else -1 for found in expected]
    assert matcher.first_of(paths) == [found[0] if found else -1 for found in expected]  # and from memory


# Pieces are small and share letters and digits with the paths, so that matches and near misses are both common.
literals = st.sampled_from(["a", "k", "K", "1", "2", "12", "/", "/k", "a/", "ak", "s", "ſ", "é", "-", "_"])
escapes = st.sampled_from([r"\.", r"\/", r"\-", r"\_", r"\|", r"\(", r"\\", r"\$"])
classes = st.sampled_from(
    [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "[0-9]", "[1-3]", "[^1]", "[^/]", "[12a]", "[a-z2]", "[^0-9]", "."]
)
zero_width = st.sampled_from(["^", "$", r"\b", r"\B", r"\A", r"\Z"])
gaps = st.sampled_from([".*", ".+", ".*?", r"\d+", "[^/]*"])


def grow(inner):
    several = st.lists(inner, min_size=1, max_size=3).map("".join)
    ways = st.lists(several | st.just(""), min_size=2, max_size=3).map("|".join)
    quantity = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,1}", "*?", "+?", "*+", "?+"])
    opening = st.sampled_from(["(", "(?:", "(?=", "(?!", "(?i:", "(?s:", "(?>", "(?P<n>"])
    return (
        several
        | ways
        | st.builds("({}){}".format, ways, quantity | st.just(""))
        | st.builds("(?:{}){}".format, several, quantity)
        | st.builds("{}{})".format, opening, ways)
        | st.builds("(?i:{}){}".format, several, several)
        | st.builds("(?<={})".format, literals)
        | st.builds("(?<!{})".format, literals)
        | st.builds(r"({}){}\1".format, ways, several)
        | st.builds("({})?{}(?(1){}|{})".format, several, several, literals, literals)
    )


atoms = literals | escapes | classes | zero_width | gaps
regexes = st.builds(
    "{}{}".format,
    st.sampled_from(["", "", "", "^", "(?i)", "(?s)", "(?m)", "(?a)", "(?x)"]),
    st.recursive(atoms, grow, max_leaves=8),
)


def valid(pattern):
    try:
        re.compile(pattern)
    except (re.error, RecursionError):
        return False
    return True


paths = st.lists(
    st.sampled_from(
        ["a", "k", "K", "ak", "1", "2", "3", "12", "21", "99", "a1", "k2k", "ſ", "K", "é", "s", "", ".", "-"]
    ),
    min_size=1,
    max_size=4,
).map("/".join)
odd_paths = st.text("ak12/\n.|$ſ\ud800", max_size=8)


@settings(max_examples=400)
@given(st.lists(regexes.filter(valid), min_size=1, max_size=6), st.lists(paths | odd_paths, min_size=1, max_size=12))
def test_any_patterns_on_any_paths(patterns, found_paths):
    check(patterns, found_paths)


plain_pieces = st.sampled_from(["a", "k", "ak", "/", "1", "12", ".*", "(a|k)", "(?:1|2|)", "(a/.*|k)", r"\.", r"\$"])
plain = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "^"]),
    st.lists(plain_pieces, max_size=6).map("".join),
    st.sampled_from(["", "$", "|a$", "|^k", "|"]),
)


@settings(max_examples=300)
@given(st.lists(plain, min_size=1, max_size=6), st.lists(paths | odd_paths, min_size=1, max_size=12))
def test_patterns_that_are_texts_with_gaps(patterns, found_paths):
    check(patterns, found_paths)


@given(st.lists(regexes.filter(valid), min_size=1, max_size=4), st.text("0123456789a/", max_size=10))
def test_digits_no_pattern_tells_apart_may_be_swapped(patterns, path):
    """Why one look-up may stand for many layers: the mask changes no answer."""
    matcher = Matcher(patterns)
    (key,) = matcher._keys([path])
    assert naive(patterns, path) == naive(patterns, key.decode())


segments = st.sampled_from(["a", "k", "1", "2", "3", "12", "21", "99", "a1", "k2k", "K", "é", "", 1, 12, True, "a/2"])


@settings(max_examples=300)
@given(
    st.lists(regexes.filter(valid) | plain, min_size=1, max_size=5),
    st.recursive(st.just(0), lambda inner: st.dictionaries(segments, inner, min_size=1, max_size=4), max_leaves=12),
)
def test_tables_of_answers_say_what_the_paths_say(patterns, tree):
    paths, _ = flatten(tree)
    found = assign(tree, Matcher(patterns).table(lambda place: place), lambda answer, leaf: answer)
    assert flatten(found) == (paths, [next(iter(naive(patterns, path)), -1) for path in paths])


@pytest.mark.parametrize(
    ("patterns", "segment", "masked"),
    [
        (["w1", "w(2|3)/", "fc[45]"], "0123456789", "0000000000"),
        (["w1", "w(2|3)/", "fc[45]"], "w0123456789", "w0123440000"),
        (["/1", "w12", "(?:x)3"], "0123", "0120"),
        (["a(1|)", "b(?=4)", "(?i)K5", r"c\b6"], "0123456", "0000400"),
    ],
)
def test_a_segment_of_digits_is_masked_further(patterns, segment, masked):
    assert Matcher(patterns)._mask(segment) == masked


@pytest.mark.parametrize(
    ("patterns", "path", "key"),
    [
        (["kernel"], "layers/17/kernel", "layers/00/kernel"),
        ([r"layers/\d+/kernel"], "layers/17/kernel", "layers/00/kernel"),
        (["w1|w3"], "layers/0123/w1", "layers/0103/w1"),
        (["[0-4]"], "0123456789", "0000055555"),
        (["[^0-4]", "2"], "0123456789", "0020055555"),
        ([r"(\d)/\1"], "0123456789", "0123456789"),
        (["(?i)[A-Z]x"], "0123456789", "0000000000"),
    ],
)
def test_digits_are_masked_as_far_as_no_pattern_sees_them(patterns, path, key):
    assert Matcher(patterns)._keys([path]) == [key.encode()]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("mlp/up", {("mlp",), ("up",)}),
        ("(q|k)_proj/kernel$", {("q_proj", "k_proj"), ("kernel",)}),
        ("attention|mlp", {("attention", "mlp")}),
        (r"layers/\d+/mlp", {("layers",), ("mlp",)}),
        ("(?:up)?/kernel", {("kernel",)}),
        ("(?:up)+", {("up",)}),
        ("(?i)MLP", {("mlp",)}),
        ("a(?=bias)", {("a",)}),
        (".*", set()),
        (r"[ab]\d", set()),
    ],
)
def test_words_every_match_holds(pattern, words):
    assert {tuple(word for word, _ in clause) for clause in Needle(pattern).reading.clauses} == words


def test_every_bad_pattern_is_listed_with_its_position():
    with pytest.raises(RuleError) as caught:
        matcher_of(("mlp", "attn/(q|k", "ok$", "[a", "*", "(?<=a*)b", "a{99999999999}"))
    message = str(caught.value)
    assert "5 patterns cannot be read" in message
    assert (
        "rule 1: not a regular expression: missing ), unterminated subpattern at position 5 [rule 'attn/(q|k']"
        in message
    )
    assert "rule 3: not a regular expression: unterminated character set at position 0 [rule '[a']" in message
    assert "rule 4: not a regular expression: nothing to repeat at position 0" in message
    assert "rule 5: not a regular expression: look-behind requires fixed-width pattern" in message
    assert "rule 6:" in message


def test_the_cache_of_re_is_left_alone():
    re.purge()
    re.compile("mine")
    Matcher([rf"layers/{i}/\w+/kernel[ab]?" for i in range(700)]).first_of([f"layers/{i}/q/kernel" for i in range(700)])
    assert len(re._cache) < 10


def test_equal_patterns_share_one_matcher():
    assert matcher_of(("a", "b")) is matcher_of(("a", "b"))


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(matching, "_MEMO_LIMIT", 100)
    matcher = Matcher(["a", "7$"])
    for start in range(0, 2000, 50):
        found = [f"x{i}" for i in range(start, start + 50)]
        assert matcher.first_of(found) == [1 if path.endswith("7") else -1 for path in found]
    assert len(matcher._memo) <= 150 and len(matcher._segments) <= 150


def test_a_python_whose_parse_tree_we_cannot_read_is_only_slower(monkeypatch):
    from shardax.names import regex

    patterns, found = [r"a\d+", "(?i)K/[0-3]", "k(a|1)"], ["a12", "k/2", "k/7", "ka", "x"]
    monkeypatch.setattr(regex, "_parser", None)
    check(patterns, found)
    monkeypatch.undo()
    monkeypatch.setattr(regex, "_VISITS", {})
    check(patterns, found)

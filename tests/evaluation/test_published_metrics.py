"""Metrics of published benchmarks, against values worked out by hand (and once checked against the originals)."""

from __future__ import annotations

import pytest

from locret_stream.evaluation.published import METRICS, Question, infinitebench, leval, longbench, overlap, ruler, score


def close(value: float) -> object:
    return pytest.approx(value, abs=1e-7)


# -- what two texts have in common ------------------------------------------------------------------------------------


def test_f1_of_words():
    assert overlap.qa_f1("The Cat, sat on a mat.", "cat on mats") == close(4 / 7)  # cat sat on mat; 2 in common
    assert overlap.qa_f1("b b b", "b b c") == close(4 / 6)
    assert overlap.qa_f1("An apple!", "apple") == 1
    assert overlap.qa_f1("another", "other") == overlap.qa_f1("", "x") == overlap.qa_f1("the", "a") == 0


def test_rouge_of_longbench():
    # different words of the sentences: 6 found, 5 expected; in common "the cat", "ran" and "a dog"
    assert overlap.rouge("the cat sat. a dog ran", "the cat ran. a dog") == close(10 / 11)
    assert overlap.rouge("a a a", "a") == close(1)
    assert overlap.rouge("The", "the") == overlap.rouge("", "x") == overlap.rouge("...", "x") == 0
    assert overlap.rouge("a. ", "a") == close(2 / 3), "a blank sentence counts as a word of its own"
    assert overlap.rouge("b a. b", "a b. b") == close(0.5), "of two longest subsequences, b"
    long = " ".join(map(str, range(1500)))
    assert overlap.rouge(long, long) == close(1)


def test_rouge_l():
    # the cat sat a dog ran | the cat ran a dog: "the cat a dog" in common
    assert overlap.rouge_l("The cat sat. A dog ran!", "the cat ran; a dog") == close(8 / 11)
    assert overlap.rouge_l("a b c", "c b a") == close(1 / 3)
    assert overlap.rouge_l("", "x") == overlap.rouge_l("船", "船") == 0, "tokens are letters and digits of ASCII"


def test_rouge_l_sum():
    assert overlap.rouge_l_sum("the cat sat\na dog ran", "the cat ran\na dog") == close(10 / 11)
    assert overlap.rouge_l_sum("cat", "cat\ncat") == close(2 / 3), "no token counts twice"
    assert overlap.rouge_l_sum("b a\nb", "a b") == close(4 / 5), "of two longest subsequences, a"
    assert overlap.rouge_l_sum("", "x") == overlap.rouge_l_sum("x", "\n\n") == 0


# -- LongBench --------------------------------------------------------------------------------------------------------


def test_longbench_chinese_is_compared_by_characters():
    assert longbench.qa_f1_zh("北京是首都。", "首都，北京") == close(8 / 9)
    assert longbench.qa_f1_zh("用 GPU 2 号", "gpu") == close(2 / 5), "letters that stand together are one token"
    assert longbench.qa_f1_zh("《船》", "船") == close(1 / 2 + 1 / 6), "》 is punctuation to LongBench, 《 is not"
    assert longbench.rouge_zh("北京大", "北大") == close(4 / 5)
    assert longbench.qa_f1_zh("", "船") == longbench.rouge_zh("", "船") == 0


def test_longbench_counts():
    assert longbench.count("There are 3.", "3") == 1
    assert longbench.count("3 or 4", "3") == 1 / 2
    assert longbench.count("33", "3") == longbench.count("three", "3") == 0
    assert longbench.retrieval("Paragraph 1", "Paragraph 1") == 1
    assert longbench.retrieval("1, 12 or 2", "Paragraph 12") == close(1 / 3)
    assert longbench.retrieval_zh("段落3", "段落3") == 1 and longbench.retrieval_zh("段落31", "段落3") == 0


def test_longbench_code_is_compared_by_its_first_line():
    assert longbench.code_sim("\n# note\nx = 1\ny", "x = 2") == 0.8  # "x = " of 5 and 5 characters
    assert longbench.code_sim("a", "ab") == 0.67
    assert longbench.code_sim("x = 1 // one\n```\nx = 1", "x = 1") == 1
    assert longbench.code_sim("`x`", "x") == longbench.code_sim("", "x") == 0


def test_longbench_classes():
    classes = ("Person", "Person's name", "Place")
    assert longbench.classification("Person's name", ("Person's name",), classes) == 1, "a part of it is not another"
    assert longbench.classification("Place or Person", ("Place",), classes) == 1 / 2
    assert longbench.classification("Place", ("Person",), classes) == 0
    assert longbench.classification("", ("Place",), classes) == 0
    assert longbench.classification("abc", ("abc",), ("a", "ab", "abc")) == 1 / 2, "the loop of LongBench misses ab"
    assert longbench.classification("Place", ("Person", "Place"), classes) == 1


# -- RULER ------------------------------------------------------------------------------------------------------------


def test_ruler():
    assert ruler.string_match_all("it is 222, and ABC", ("111", "222", "abc")) == close(2 / 3)
    assert ruler.string_match_all("", ("111",)) == 0 and ruler.string_match_all("111", ("111",)) == 1
    assert ruler.string_match_part("In the EVENING", ("noon", "the evening")) == 1
    assert ruler.string_match_part("dusk", ("noon", "the evening")) == 0
    assert ruler.string_match_part("a\tb", ("a\nb",)) == 1, "control characters are line ends"


# -- ∞Bench -----------------------------------------------------------------------------------------------------------


def test_infinitebench_numbers():
    assert infinitebench.first_integer("is 0071, not 5", "0071") == 1
    assert infinitebench.first_integer("71", "0071") == infinitebench.first_integer("5 71", "71") == 0
    assert infinitebench.last_integer("func_1(3) is: -12.", "-12") == infinitebench.last_integer("`7`", "7") == 1
    assert infinitebench.last_integer("7 it is", "7") == infinitebench.last_integer("", "7") == 0
    assert infinitebench.first_number("about 3.0", "3") == infinitebench.first_number("2.5 and 3", "2.5") == 1
    assert infinitebench.first_number("3.5", "3") == infinitebench.first_number("none", "3") == 0
    assert infinitebench.leading_integers("[1, 4, 9, 8]", ("1", "4", "8", "8")) == 1 / 2
    assert infinitebench.leading_integers("1, 4", ("1", "4", "8", "8")) == 1 / 2
    assert infinitebench.leading_integers("-3", ("-3",)) == 0, "a sign is not read"


def test_infinitebench_words():
    assert infinitebench.word('{"key": "2b-9f"}', "2b-9f") == 1
    assert infinitebench.word("2b-9f0", "2b-9f") == 0
    assert infinitebench.named("It is old Brandt.", ("LUND", "BRANDT")) == 1
    assert infinitebench.named("Holm", ("LUND", "BRANDT")) == 0
    assert infinitebench.qa_f1_zh("用 GPU2 号。", "gpu") == close(6 / 9), "every character is a token"


@pytest.mark.parametrize(("found", "value"), [
    ("C", 1), (" C. Lund", 1), ("Lund", 1), ("B", 0), ("", 0), ("The answer is: C", 1), ("not B, I take C", 1),
    ("it is B\nno, C", 0), ("it is C\nno, B", 1), ("Certainly not", 1), ("Because", 0), ("the answer is Lund", 1),
    ("the answer is Holm", 0), ("the answer is", 0), ("so the option is  Lund!", 1), ("perhaps AB or x", 0),
    ("none", 0),
])
def test_infinitebench_choice(found: str, value: float):
    assert infinitebench.choice(found, ("Lund", "C")) == value


@pytest.mark.parametrize(("found", "value"), [
    ("C", 1), ("C.", 1), ("lund.sail", 1), ("B", 0), ("", 0), ("it is H", 0), ("Option lund.sail", 0),
    ("The answer is: lund.sail", 1), ("The correct option is: *lund.sail*", 1), ("The error is: holm", 0),
    ("the answer: lund.sail", 1), ("Sail", 0), ("is:", 0),
])
def test_infinitebench_culprit(found: str, value: float):
    assert infinitebench.culprit(found, ("lund.sail", "C")) == value


# -- L-Eval -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("found", "expected", "value"), [
    ("B", "B", 1), ("B", "B. the sea", 1), ("Answer: B", "B", 0), ("the B", "B", 1), ("Because A", "B", 1),
    ("A", "B", 0), ("none", "A", 1), ("none", "B", 0), ("", "B", 0),
])
def test_leval_letter(found: str, expected: str, value: float):
    assert leval.letter(found, expected) == value


@pytest.mark.parametrize(("found", "expected", "value"), [
    ("BD", "BD", 1), ("DB", "BD", 1), ("B", "BD", 0.25), ("BC", "BD", 0), ("ABCD", "BD", 0), ("B. x D) y", "BD", 1),
    ("D and B.", "BD", 1), ("I say B.\nQuestion C.", "B", 1), ("none", "A", 1), ("", "BD", 0),
])
def test_leval_letters(found: str, expected: str, value: float):
    assert leval.letters(found, expected) == value


@pytest.mark.parametrize(("found", "expected", "value"), [
    ("The answer is $1,800.50", "1800", 1), ("2 + 16 = 18 eggs", "18", 1), ("18 eggs\n\nor 20", "18", 1),
    ("18", "8", 0), ("", "18", 0), ("The answer is 18.", "18", 1), ("none", "18", 0),
])
def test_leval_number(found: str, expected: str, value: float):
    assert leval.number(found, expected) == value


def test_leval_code():
    assert leval.code("So the final output will be: [ [1, 2.0] ]", "[[1, 2]]") == 1
    assert leval.code("The value of the code is 7", "7") == 1
    assert leval.code("7 , which came after 1 2 3 4 5", "7") == 0, "of one word expected, the last four are looked at"
    assert leval.code("the final output is 1 2 3 4 7", "7") == 0, "of one word expected, the first four are looked at"
    assert leval.code("hello", "olleh") == 0


def test_leval_true_or_false():
    assert leval.true_false("This is True. Not false.", "True [fact: False]") == 1
    assert leval.true_false("no [fact: True]", "True [fact: True]") == 0
    assert leval.true_false("false", "True") == 0 and leval.true_false("", "False") == 0


def test_leval_exact():
    assert leval.exact("We spoke of The  Sea.", "the sea") == 1
    assert leval.exact("x\nthe sea\nthe moon", "the sea") == 1, "the first line of more than one character"
    assert leval.exact("the moon\nthe sea", "the sea") == 0
    assert leval.exact("18.0", "18") == 1 and leval.exact("180", "18") == 0


# -- by name ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_is_a_share(metric: str):
    answers = {"longbench/retrieval": ("Paragraph 1",), "longbench/retrieval_zh": ("段落1",),
               "infinitebench/choice": ("Lund", "C"), "infinitebench/culprit": ("Lund", "C"),
               "leval/true_false": ("True",)}.get(metric, ("1",))
    question = Question("?", answers, metric, 8, classes=("1", "2"))
    for found in ("", " ", "\n\n\n", answers[0], "Lund", "1 2 3", "船长。", "\x00", "." * 50, "(" * 50, "{0}", "None"):
        value = score(question, found)
        assert isinstance(value, float) and 0 <= value <= 1
    assert score(question, answers[0]) == close(1)


@pytest.mark.parametrize("metric", ["longbench/qa_f1", "longbench/rouge", "longbench/code_sim", "longbench/count",
                                    "infinitebench/qa_f1", "infinitebench/rouge_l_sum", "leval/f1"])
def test_the_best_of_several_references_counts(metric: str):
    assert score(Question("?", ("9", "7", "8"), metric, 8), "7") == close(1)


def test_only_the_first_line_counts_where_the_benchmark_says_so():
    question = Question("?", ("sea",), "longbench/qa_f1", 8, first_line=True)
    assert score(question, "\n\nsea\nmoon and stars") == 1 and score(question, "moon\nsea") == 0

"""Files of published benchmarks, small ones made here in their form: documents, questions, errors that say where."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from pathlib import Path

import pytest

from locret_stream.errors import ConfigError
from locret_stream.evaluation import published
from locret_stream.evaluation.published import Document, Question, load, score

TEXT = "The ferry leaves at nine.\nIts captain is called Brandt. {Not} a template.\n"
NUMBERS = "What are all the special magic numbers for grey-heron and red-fox mentioned in the provided text?"


def longbench(**more) -> dict:
    return {"input": "Who steers the ferry?", "context": TEXT, "answers": ["Brandt", "Captain Brandt"], "length": 19,
            "dataset": "hotpotqa", "language": "en", "all_classes": None, "_id": "7f"} | more


def ruler(**more) -> dict:
    return {"index": 3, "input": f"Some special magic numbers are hidden.\n{TEXT}{NUMBERS}", "outputs": ["4711", "815"],
            "length": 4000} | more


def infinitebench(**more) -> dict:
    return {"id": 0, "context": TEXT, "input": "Who steers the ferry?", "answer": ["Brandt"], "options": []} | more


def leval(**more) -> dict:
    return {"instructions": ["Who steers?\nA. Brandt\nB. Nobody", "When?\nA. eight\nB. nine"], "outputs": ["A", "B"],
            "input": TEXT, "source": "invented", "evaluation": "exam"} | more


def write(folder: Path, name: str, *records: dict | bytes, end: bytes = b"\n") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + end for r in records))
    return path


def one(path: Path, **more) -> tuple[Document, Question]:
    """The only document of a file, and its only question."""
    [document] = load(path, **more)
    [question] = document.questions
    return document, question


# -- what a record becomes --------------------------------------------------------------------------------------------


def test_longbench(tmp_path: Path):
    document, question = one(write(tmp_path, "any.jsonl", longbench()))
    assert (document.benchmark, document.task) == ("longbench", "hotpotqa")
    assert document.context == "Here are passages from an encyclopedia.\n\n" + TEXT
    assert question.text.startswith("\n\nThose were the passages. Reply with a phrase alone")
    assert question.text.endswith("\n\nQuestion: Who steers the ferry?\nAnswer:")
    assert question.answers == ("Brandt", "Captain Brandt") and question.metric == "longbench/qa_f1"
    assert (question.max_new_tokens, question.name, question.classes) == (32, "7f", ())
    assert not question.first_line


def test_longbench_classes_and_first_lines(tmp_path: Path):
    record = longbench(dataset="trec_e", all_classes=["Food", "Animal"], answers=["Animal"], input="What barks?")
    document, question = one(write(tmp_path, "trec_e.jsonl", record))
    assert document.task == "trec" and question.classes == ("Food", "Animal") and question.first_line
    assert question.text == "\nWhat barks?"
    assert score(question, "\n\nAnimal\nType: Food") == 1 and score(question, "Type: Food\nAnimal") == 0


def test_values_with_braces_are_text(tmp_path: Path):
    document, question = one(write(tmp_path, "a.jsonl", longbench(input="{context} or {0}?", context="{input}")))
    assert document.context.endswith("\n{input}") and "Question: {context} or {0}?" in question.text


LONGBENCH = {  # of task.md and config/dataset2maxlen.json
    "qa_f1": {"narrativeqa": 128, "qasper": 128, "multifieldqa_en": 64, "hotpotqa": 32, "2wikimqa": 32, "musique": 32,
              "triviaqa": 32},
    "qa_f1_zh": {"multifieldqa_zh": 64}, "rouge_zh": {"dureader": 128, "vcsum": 512},
    "rouge": {"gov_report": 512, "qmsum": 512, "multi_news": 512, "samsum": 128},
    "classification": {"trec": 64, "lsht": 64}, "retrieval": {"passage_retrieval_en": 32},
    "retrieval_zh": {"passage_retrieval_zh": 32}, "count": {"passage_count": 32},
    "code_sim": {"lcc": 64, "repobench-p": 64},
}
REFERENCE = {"retrieval": "Paragraph 4", "retrieval_zh": "段落4", "count": "4", "classification": "Animal"}


@pytest.mark.parametrize("metric", LONGBENCH)
def test_every_task_of_longbench(tmp_path: Path, metric: str):
    for task, tokens in LONGBENCH[metric].items():
        reference = REFERENCE.get(metric, "a grey heron")
        document, question = one(write(tmp_path, "a.jsonl", longbench(dataset=task, answers=["no", reference][-1:],
                                                                      all_classes=["Food", "Animal"])))
        assert (document.task, question.metric, question.max_new_tokens) == (task, f"longbench/{metric}", tokens)
        assert question.first_line == (task in ("trec", "triviaqa", "samsum", "lsht"))
        assert TEXT in document.context and "{input}" not in document.context + question.text
        asks = task not in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
        assert ("Who steers" in question.text) == asks and "Who steers" not in document.context
        assert score(question, reference) == pytest.approx(1, abs=1e-7) and score(question, "zzz") == 0


def test_ruler_is_cut_where_its_question_begins(tmp_path: Path):
    document, question = one(write(tmp_path, "niah_multiquery/validation.jsonl", ruler(answer_prefix=" They are")))
    assert (document.benchmark, document.task) == ("ruler", "niah_multiquery")
    assert document.context.endswith("Not} a template.\n")
    assert question.text == NUMBERS + " They are"
    assert question.answers == ("4711", "815") and question.metric == "ruler/string_match_all"
    assert (question.max_new_tokens, question.name) == (128, "3")


@pytest.mark.parametrize(("task", "text", "asked"), [
    ("niah_single_2", "Remember. A heron flies. ", "What is the special magic uuid for x mentioned in the text?"),
    ("vt", "Track. VAR A = 1 Question: Find all variables that are assigned 1. A VAR B = 2\n",
     "Question: Find all variables that are assigned the value 2 in the text above. [/INST]"),
    ("cwe", "1. heron 2. fox\n", "Question: What are the 10 most common words in the above list?<|end|>\n\n"),
    ("freq_words_extraction", "Read. abc .... abc\n", "Question: Do not provide any explanation. Which three?"),
    ("qa_2", "Document 1:\nQuestion: a title.\n\nAnswer it.\n\n", "Question: Who steers?"),
    ("qa_1", "A text in a language of its own.\n\n", "Frage: Wer steuert? \n \n"),
])
def test_ruler_questions(tmp_path: Path, task: str, text: str, asked: str):
    document, question = one(write(tmp_path, f"{task}.jsonl", ruler(input=text + asked)))
    assert (document.context, question.text, document.task) == (text, asked, task)
    assert question.metric == "ruler/string_match_" + ("part" if task.startswith("qa") else "all")
    assert question.max_new_tokens == {"ni": 128, "vt": 30, "cw": 120, "fr": 50, "qa": 32}[task[:2]]


INFINITEBENCH = {  # answer, metric, longest answer, what is asked last
    "passkey": ("71432", "first_integer", 6, "Who steers the ferry?\n\nThe pass key:"),
    "number_string": ("0071432", "first_integer", 12, "\n\nThe number:"),
    "kv_retrieval": ("2b-9f", "word", 50, "\n\nWho steers the ferry?"),
    "longbook_sum_eng": ("A ferry sinks.", "rouge_l_sum", 1200, "\n\nSummary:"),
    "longbook_choice_eng": ("Lund", "choice", 40, "A. Holm\nB. Brandt\nC. Lund\nD. Falk\n\nLetter:"),
    "longbook_qa_eng": ("Brandt", "qa_f1", 40, "Question: Who steers the ferry?\nAnswer:"),
    "longbook_qa_chn": ("船长", "qa_f1_zh", 40, "问题：Who steers the ferry?\n答案："),
    "longdialogue_qa_eng": ("BRANDT", "named", 40, "The character that $$MASK$$ stands for:"),
    "math_find": (17, "first_number", 3, "The second largest number of the list is: "),
    "math_calc": ([1, 4, 2], "leading_integers", 30000, "\nSteps:"),
    "code_run": (-12, "last_integer", 5, "What does func_3(-4) give? It gives"),
    "code_debug": ("Lund", "culprit", 5, "C. Lund\nD. Falk\n\nLetter:"),
}


@pytest.mark.parametrize("task", INFINITEBENCH)
@pytest.mark.parametrize("form", ["bare", "list", "text"])
def test_every_task_of_infinitebench(tmp_path: Path, task: str, form: str):
    answer, metric, tokens, asked = INFINITEBENCH[task]
    given = answer if form == "bare" or isinstance(answer, list) else [answer]
    given = list(map(str, given)) if form == "text" and isinstance(given, list) else given
    words = {"code_run": "Give me the value of func_3(-4).",
             "math_find": "One number. The second largest number of the list is: "}.get(task, "Who steers the ferry?")
    record = infinitebench(answer=given, input=words, options=["Holm", "Brandt", "Lund", "Falk"])
    document, question = one(write(tmp_path, f"{task}.jsonl", record))
    assert (document.benchmark, document.task) == ("infinitebench", task)
    assert document.context.endswith(TEXT) and question.text.endswith(asked)
    assert (question.metric, question.max_new_tokens) == (f"infinitebench/{metric}", tokens)
    if metric in ("choice", "culprit"):
        assert question.answers == ("Lund", "C") and score(question, "C") == score(question, "Lund") == 1
    else:
        expected = answer if isinstance(answer, list) else [answer]
        assert question.answers == tuple(map(str, expected))
        assert score(question, " ".join(question.answers)) == 1
    assert score(question, "B") == score(question, "") == 0


def test_infinitebench_prompts_know_what_they_name(tmp_path: Path):
    find = write(tmp_path, "math_find.jsonl", infinitebench(answer=3, input="The median of the list is"))
    assert one(find)[0].context.startswith("Of the numbers below, find the median.\n\n")
    run = write(tmp_path, "code_run.jsonl", infinitebench(answer=3, input="Call func_12(7)!"))
    assert "has a function func_12.\n" in one(run)[0].context
    letter = write(tmp_path, "code_debug.jsonl", infinitebench(answer=["Holm", "A"], options=list("wxyz")))
    assert one(letter)[1].answers == ("Holm", "A")


def test_leval_asks_all_questions_of_one_text(tmp_path: Path):
    [document] = load(write(tmp_path, "quality.jsonl", leval()))
    assert (document.benchmark, document.task) == ("leval", "quality") and document.context.endswith(TEXT)
    assert [q.answers for q in document.questions] == [("A",), ("B",)]
    assert document.questions[1].text == "\n\nWhen?\nA. eight\nB. nine\nAnswer:"
    assert {(q.metric, q.max_new_tokens) for q in document.questions} == {("leval/letter", 512)}


@pytest.mark.parametrize(("task", "evaluation", "metric", "output"), [
    ("coursera", "exam", "leval/letters", "BD"), ("tpo", "exam", "leval/letter", "D"),
    ("gsm100", "exam", "leval/number", "18"), ("codeU", "exam", "leval/code", "[1, 2]"),
    ("sci_fi", "exam", "leval/true_false", "True [fact: False]"),
    ("topic_retrieval_longchat", "exam", "leval/exact", "sea"), ("history", "exam", "leval/exact", "sea"),
    ("narrative_qa", "f1", "leval/f1", "a cold sea"),
    ("meeting_summ", "rouge", "leval/rouge_l", "a cold sea"),
])
def test_leval_metrics(tmp_path: Path, task: str, evaluation: str, metric: str, output: str):
    _, question = one(write(tmp_path, f"{task}.jsonl", leval(instructions=["What?"], outputs=[output],
                                                             evaluation=evaluation)))
    assert question.metric == metric and score(question, output) == 1 and score(question, "zzz") == 0
    assert ("Answer in 3 words." in question.text) == (evaluation in ("f1", "rouge"))


@pytest.mark.parametrize("evaluation", ["human", "LLM"])
def test_what_only_people_or_models_judge_has_no_score(tmp_path: Path, evaluation: str):
    [document] = load(write(tmp_path, "paper_assistant.jsonl", leval(evaluation=evaluation)))
    assert {question.metric for question in document.questions} == {""}
    assert "words" not in document.questions[0].text
    with pytest.raises(ConfigError, match="by people or by a judging model"):
        score(document.questions[0], "A")


def test_documents_cannot_be_changed(tmp_path: Path):
    document, question = one(write(tmp_path, "a.jsonl", longbench()))
    for thing, field in ((document, "context"), (question, "answers")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, ())


def test_all_metrics_of_the_prompts_exist():
    names = {one.name for one in published.BENCHMARKS.values()}
    assert names == {"longbench", "ruler", "infinitebench", "leval"}
    with pytest.raises(ConfigError, match=r"found the metric 'longbench/bleu', expected one of infinitebench/choice, "):
        score(Question("?", ("a",), "longbench/bleu", 1), "a")


# -- files ------------------------------------------------------------------------------------------------------------

FILES = {"longbench": ("a.jsonl", longbench()), "ruler": ("niah_single_1.jsonl", ruler()),
         "infinitebench": ("passkey.jsonl", infinitebench()), "leval": ("tpo.jsonl", leval())}


@pytest.mark.parametrize("kind", FILES)
def test_the_fields_tell_the_benchmark(tmp_path: Path, kind: str):
    name, record = FILES[kind]
    path = write(tmp_path, name, record)
    assert published.detect(path) == published.detect(str(path)) == kind
    assert list(load(str(path))) == list(load(path, kind)) != []


@pytest.mark.parametrize("kind", FILES)
def test_line_ends_blank_lines_and_a_byte_order_mark_do_not_matter(tmp_path: Path, kind: str):
    name, record = FILES[kind]
    key = next(key for key in ("context", "input") if TEXT in record.get(key, ""))
    other = record | {key: "Grüße 船长 🚢\r\n" + record[key]}
    plain = list(load(write(tmp_path / "a", name, record, other)))
    raw = json.dumps(other, ensure_ascii=False).encode()
    lines = (b"\xef\xbb\xbf" + json.dumps(record).encode(), b"", b"  \t", raw)
    assert list(load(write(tmp_path / "b", name, *lines, end=b"\r\n"))) == plain
    assert len(plain) == 2 and "Grüße 船长 🚢\r\n" in plain[1].context
    assert list(load(write(tmp_path / "c", name, *lines[::3], b"")))[1] == plain[1], "no newline at the end"


def test_neighbours_of_one_text_are_one_document(tmp_path: Path):
    def ask(book: str, what: str, number: int) -> dict:
        return infinitebench(id=number, context=book, input=what)

    path = write(tmp_path, "longbook_qa_eng.jsonl", ask("one", "a?", 0), ask("one", "b?", 1), ask("two", "c?", 2),
                 ask("one", "d?", 3))
    documents = list(load(path))
    assert [[q.name for q in document.questions] for document in documents] == [["0", "1"], ["2"], ["3"]]
    assert documents[0].context.endswith("one") and "Question: b?" in documents[0].questions[1].text
    differ = write(tmp_path, "math_find.jsonl", *(infinitebench(answer=1, input=f"The {what} number of the list is")
                                                  for what in ("largest", "smallest")))
    assert len(list(load(differ))) == 2, "their prompts begin differently"


def test_a_large_file_is_not_read_whole(tmp_path: Path):
    path, size = tmp_path / "hotpotqa.jsonl", 1_000_000
    with path.open("wb") as file:
        for number in range(40):
            file.write(json.dumps(longbench(context=f"{number} " * (size // 3))).encode() + b"\n")
        file.write(b"{broken")
    documents = load(path)
    tracemalloc.start()
    try:
        seen = 0
        with pytest.raises(ConfigError, match="line 41"):
            for document in documents:
                assert len(document.context) > size // 2
                seen += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == 39 and peak < 15 * size  # the last one is held back, as the next line might ask more of it


@pytest.mark.parametrize(("name", "line", "message"), [
    ("a.jsonl", b"{broken", "not an object of JSON: JSON is malformed"),
    ("a.jsonl", b"[1, 2]", "not an object of JSON: Expected `object`, got `array`"),
    ("a.jsonl", b'{"input": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
    ("a.jsonl", b'{"input": "x", "context": "y"}', "missing required field `answers`; found the fields context, input, "
                                                   "expected those of LongBench, at least answers, context, dataset"),
    ("a.jsonl", longbench(context=None), r"Expected `str`, got `null` - at `\$.context`"),
    ("a.jsonl", longbench(answers="Brandt"), r"Expected `array`, got `str` - at `\$.answers`"),
    ("a.jsonl", longbench(answers=[]), "`answers` is empty"),
    ("a.jsonl", longbench(dataset="hotpot"), "no dataset 'hotpot'; expected one of 2wikimqa, dureader"),
    ("a.jsonl", longbench(dataset="lsht"), "`all_classes` is missing or empty; lsht"),
    ("a.jsonl", longbench(dataset="passage_retrieval_en"), r"found the answers \['Brandt'.*expected .*Paragraph"),
    ("niah_single_1.jsonl", ruler(outputs=[]), "`outputs` is empty"),
    ("niah_single_1.jsonl", ruler(outputs=["4711", " "]), "which any answer would hold"),
    ("longdialogue_qa_eng.jsonl", infinitebench(answer=[""]), "which any answer would hold"),
    ("a.jsonl", b'{"x": ' + b"[" * 100_000, "not an object of JSON: "),
    ("niah_single_1.jsonl", ruler(outputs=[4711]), "Expected `str`, got `int`"),
    ("niah_single_1.jsonl", ruler(input="one line"), "is one line without a question of niah_single_1"),
    ("passkey.jsonl", infinitebench(answer=None), r"got `null` - at `\$.answer`"),
    ("passkey.jsonl", infinitebench(answer=[]), "`answer` is empty"),
    ("math_calc.jsonl", infinitebench(answer=["one"]), r"found the answer \['one'\], expected numbers"),
    ("math_find.jsonl", infinitebench(answer=3), "expected a sentence such as 'The largest number"),
    ("code_run.jsonl", infinitebench(answer=3), "found the input 'Who steers.*expected a call"),
    ("longbook_choice_eng.jsonl", infinitebench(), "found 0 `options`, expected 4 in longbook_choice_eng"),
    ("longbook_choice_eng.jsonl", infinitebench(options=list("wxyz")), r"answer \['Brandt'\], expected one of the"),
    ("tpo.jsonl", leval(outputs=["A"]), "found 2 `instructions` and 1 `outputs`"),
    ("tpo.jsonl", leval(instructions=[], outputs=[]), "found 0 `instructions` and 0 `outputs`"),
    ("tpo.jsonl", leval(evaluation="bleu"), "found the evaluation 'bleu', expected exam, f1, rouge, human or LLM"),
])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, name: str, line: bytes | dict, message: str):
    kind = {file: key for key, (file, _) in FILES.items()}.get(name, "infinitebench")
    path = write(tmp_path, name, b"", line)
    with pytest.raises(ConfigError, match=message) as caught:
        list(load(path, kind))
    assert str(caught.value).startswith(f"{path}, line 2: ")


def test_a_file_that_tells_too_little_is_refused_at_once(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"there is no file .*nowhere\.jsonl"):
        load(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="is a folder; expected one of its files"):
        load(tmp_path, "longbench")
    with pytest.raises(ConfigError, match="holds no record"):
        load(write(tmp_path, "empty.jsonl", b"", b" "))
    with pytest.raises(ConfigError, match=r"line 1: not an object of JSON"):
        load(write(tmp_path, "text.jsonl", b"Hello."))
    v2 = {"_id": "1", "question": "?", "choice_A": "", "answer": "A", "context": ""}
    with pytest.raises(ConfigError, match=r"line 1: found the fields _id, answer.*; expected answers, context, "
                                          r"dataset, input \(LongBench\); or input, outputs \(RULER\)"):
        load(write(tmp_path, "v2.jsonl", v2))
    path = write(tmp_path, "a.jsonl", longbench())
    with pytest.raises(ConfigError, match="no benchmark 'LongBench'; expected one of infinitebench, leval, longbench"):
        load(path, "LongBench")
    with pytest.raises(ConfigError, match="LongBench has no task 'hotpot'; expected 2wikimqa"):
        load(path, task="hotpot")


@pytest.mark.parametrize(("record", "task"), [(ruler(), "niah_single_1"), (infinitebench(), "passkey")])
def test_a_task_that_no_name_tells_is_asked_for(tmp_path: Path, record: dict, task: str):
    path = write(tmp_path, "data/validation.jsonl", record)
    with pytest.raises(ConfigError, match=r"nothing tells of which task .*name the task, one of"):
        load(path)
    assert one(path, task=task)[0].task == task
    assert one(write(tmp_path, f"{task}/validation.jsonl", record))[0].task == task
    with pytest.raises(ConfigError, match="has no task 'passkeys'"):
        load(path, task="passkeys")


def test_a_task_that_is_given_outdoes_what_the_record_says(tmp_path: Path):
    document, question = one(write(tmp_path, "a.jsonl", longbench()), task="gov_report")
    assert document.task == "gov_report" and question.metric == "longbench/rouge"

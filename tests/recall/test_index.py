"""What an index finds, and that it always holds just the ids that it was given."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import unicodedata

import numpy as np
import pytest

from locret_stream.errors import ConfigError
from locret_stream.recall import Cutter, Index
from locret_stream.recall.passages import Cut
from locret_stream.recall.words import Question
from locret_stream.text import TextCodec
from tests.training.tiny import make_tokenizer


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(make_tokenizer())


@pytest.fixture
def index(codec: TextCodec):
    made = new(codec)
    yield made
    made.close()


def new(codec: TextCodec, **more) -> Index:
    return Index(lambda start: Cutter(codec, start=start, least=8, most=80), **more)


def size(text: str) -> int:
    return len(text.split())


def held(index: Index):
    """All that can be found, and the ids."""
    rows = index._db.execute("select start, ids, text from passages order by start").fetchall()
    words = index._db.execute("select count(*) from words where words match '\"line\" or \"code\"'").fetchone()
    index._db.execute("insert into words (words, rank) values ('integrity-check', 1)")  # also of what it was made of
    index._db.commit()
    return rows, words, index.end, index._cutter.ids, index._ids_from(0)


STORY = "".join(f"Line {n} of the story says that the weather is {r} today.\n" for n, r in enumerate(
    random.Random(1).choices(["mild", "cold", "wet"], k=300)))


def test_its_bytes_are_those_of_the_database_and_grow_with_the_text(index: Index, codec: TextCodec):
    assert index.bytes == 0
    index.add(codec.encode_text(STORY))
    small = index.bytes
    assert len(STORY) < small == len(index._db.serialize())
    index.add(codec.encode_text(STORY * 3))
    twin = index.copy()
    assert small < index.bytes == twin.bytes == len(index._db.serialize())
    twin.close()
    assert twin.bytes == 0 < index.bytes


def test_the_words_of_a_question_find_the_passage(index: Index, codec: TextCodec):
    lines = STORY.splitlines(keepends=True)
    lines.insert(100, "The door code of the library is 48213.\n")
    lines.insert(200, "Because the ferry came late, nobody opened the library.\n")
    index.add(codec.encode_text("".join(lines) + "end"))
    (found,) = index.search("What is the door code of the library?", 10, size)
    assert found.text == "The door code of the library is 48213."
    assert codec.decode(found.ids).strip() == found.text
    whole = codec.encode_text("".join(lines) + "end")
    assert whole[found.start:found.start + len(found.ids)] == found.ids
    (found,) = index.search("WHY did nobody open it?", 10, size)
    assert "Because the ferry" in found.text, "words are stemmed, whatever their case"


def test_what_is_found_fits_and_is_in_order(index: Index, codec: TextCodec):
    index.add(codec.encode_text(STORY.replace("0 of the story", "0 of the hail")))
    for most in (5, 11, 40, 100):
        found = index.search("line hail wet", most, size)
        assert sum(size(passage.text) for passage in found) <= most
        assert [passage.start for passage in found] == sorted(passage.start for passage in found)
    assert len(index.search("line hail wet", 100, size)) > 3


def test_of_equal_passages_the_newest_is_found(index: Index, codec: TextCodec):
    index.add(codec.encode_text("The code of the gate is 1234 today.\n" * 3 + STORY))
    index.add(codec.encode_text("The code of the gate is 1234 today.\nend"))
    (found,) = index.search("code of the gate", 8, size)
    assert found.start > len(codec.encode_text(STORY))


def test_where_the_question_itself_was_asked_comes_behind_what_tells(index: Index, codec: TextCodec):
    question = "What is the code of the gate?"
    index.add(codec.encode_text("The code of the gate is 1234 today, they say.\n" + STORY[:600]))
    index.add(codec.encode_text(f"{question}\nI do not know.\n" * 3 + STORY[:300]))
    (found,) = index.search(question, 10, size)
    assert found.text.startswith("The code of the gate is 1234")
    told, asked = index.search(question, 40, size)
    assert told == found and question in asked.text, "there is room for both"
    index.truncate(0)
    index.add(codec.encode_text("The gate opens to 1234 today, they say.\n" + STORY[:600]))
    index.add(codec.encode_text(f"{question}\nI do not know.\n" * 3 + STORY[:300]))
    assert any(question in passage.text for passage in index.search(question, 40, size))


@pytest.mark.parametrize("told", ["The code of the west gate is 4711 now, says the porter.",
                                  "Code of the west gate: 4711",
                                  "All know the code of the west gate; 4711."])
def test_what_tells_in_the_words_of_a_question_does_not_ask_it(index: Index, codec: TextCodec, told: str):
    """A question may be a name and a question mark; then what tells has all its words, one behind the other."""
    index.add(codec.encode_text(f"{told}\n{STORY[:600]}\nThe code of the east gate is 1234.\n{STORY[:600]}"))
    (found,) = index.search("Code of the west gate?", 12, size)
    assert told in found.text
    asked = "What, they asked, is the code of the west gate?\n"
    index.add(codec.encode_text(asked * 2 + STORY[:300]))
    assert [told in passage.text for passage in index.search("Code of the west gate?", 12, size)] == [True]


def test_a_passage_with_more_of_the_words_is_found_beside_one_that_has_one_often(index: Index, codec: TextCodec):
    """The newest of those with the most telling words, where BM25 prefers a short one that says one of them twice."""
    best, ports = "Ridge here, ridge there, a ridge.", "".join(f"Ship {n} lies in port again.\n" for n in range(12))
    index.add(codec.encode_text(f"{ports}{best}\n{STORY[:900]}\nAs of noon the ridge has port 2346 now.\n"
                                f"{STORY[:900]}\nAt last they came to a ridge.\n"))
    for newer in ("", "As of midnight the ridge has port 2399 now.\n"):
        index.add(codec.encode_text(newer + STORY[:900]))
        assert best in [passage.text for passage in index.search("What is the port of ridge?", 8, size)]
        texts = [passage.text for passage in index.search("What is the port of ridge?", 16, size)]
        assert best in texts
        assert any("2399" if newer else "2346" in text for text in texts)


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_what_was_told_anew_is_found_where_the_question_was_asked_before(index: Index, codec: TextCodec, asked: int):
    """A passage in which it was asked has words that nothing has that tells, such as those of a polite question."""
    lines = [f"Nothing of note happened on day {n}, so they wrote in the log of it." for n in range(90)]
    question = "Remind me, what is the port of ridge?"
    lines[10:10] = ["Ridge has port 2346, said Ann then.", "They came to ridge port at noon, the port of ridge."]
    lines[40:40] = [f"Ann said: {question} It was 2346, as of day {n}." for n in range(asked)]
    lines[60:60] = ["Up at ridge no port was free."]
    lines[80:80] = ["As of midnight, dear all of you, up at ridge the port is 2399"]
    index.add(codec.encode_text("\n".join(lines) + STORY[:600]))
    found = index.search(question, 30, size)
    assert any("2399" in passage.text for passage in found), [passage.text for passage in found]


def test_a_statement_that_ends_with_the_words_of_a_question_is_read_alone(index: Index, codec: TextCodec):
    """It answers by itself; what stands behind it is not read with it. A part of the question tells nothing."""
    told = "Now 4711 is the code of the west gate."
    story = STORY[:600]
    index.add(codec.encode_text(f"The code of the west gate.\n{story}\n{told}\nThe porter went to bed.\n{story}"))
    (found,) = index.search("Code of the west gate?", 30, size)
    assert found.text == told


@pytest.mark.parametrize(("text", "asks"), [
    ("What, what is the port of ridge? They know.", True), ("What is the port of ridge", True),
    ("What is the port of ridge\u2028They know.", True), ("What is the port of ridge?", True),
    ("It is 2399 now, what is the port of ridge.", False), ("What is the port of ridge: 22", False),
    ("what is the port of ridges?", False), ("Port of ridge?", False)])
def test_where_a_question_is_asked(text: str, asks: bool):
    assert Question("What is the port of ridge?").is_asked_in(text) == asks


def test_a_part_of_a_question_has_no_other_words():
    question = Question("What is the port of ridge?")
    assert question.has_all(["port", "of", "ridge"]) and not question.has_all(["port", "of", "ridge", "2346"])


def test_a_question_that_ends_as_a_statement_is_asked_where_it_stands():
    question = Question("Tell me the (new) port of ridge.")
    assert question.is_asked_in("I said: tell me the new port of ridge. At once!")
    assert not question.is_asked_in("I tell me the new port of ridge is 22.")


@pytest.mark.parametrize(("answer", "found"), [
    (" A: it is 48213, as the porter wrote to all in May.", True),
    ("\n\nIt is 48213, as the porter wrote to all in May.", True), ("", False)])
def test_an_answer_behind_its_question_is_found_where_others_fit_better(index: Index, codec: TextCodec, answer: str,
                                                                        found: bool):
    """As in a page of questions and answers; a question behind which nothing tells is left out."""
    question, better = "What is the door code of falcon?", "A falcon door code was lost in May, they say."
    index.add(codec.encode_text(f"{better}\n{STORY[:1200]}\nSomebody wrote on the wall at noon: {question}{answer}\n"
                                + f"{question} {question}\n" * (not found) + STORY))
    texts = [passage.text for passage in index.search(question, 60, size)]
    assert any("48213" in text for text in texts) == any(question in text for text in texts) == found
    assert better in texts


def test_what_is_read_behind_a_question_is_not_read_twice(index: Index, codec: TextCodec):
    question, answer = "What is the door code of falcon?", "The door code of falcon is 48213, as ever."
    index.add(codec.encode_text(f"{STORY[:1200]}\nQ: {question}\n\n{answer}\n{STORY}"))
    found = index.search(question, 60, size)
    assert "\n".join(passage.text for passage in found).count("48213") == 1


NINE = [f"The door code of falcon is {number}.\n" for number in range(11111, 11120)]


@pytest.mark.parametrize("newest", ["After the meeting at noon it was agreed: The door code of falcon is 99999.",
                                    "Door codes anew: falcon 99999, since the weather of that story got worse."])
@pytest.mark.parametrize("behind", ["", "What is the door code of falcon?\nI do not know.\n" * 4])
def test_what_was_told_anew_is_always_among_what_is_found(index: Index, codec: TextCodec, newest: str, behind: str):
    index.add(codec.encode_text("".join(f"{line}{STORY[:300]}\n" for line in NINE) + f"{newest}\n" + behind + STORY))
    for most in (30, 60, 200):
        found = [passage.text for passage in index.search("What is the door code of falcon?", most, size)]
        assert any("99999" in text for text in found) and len(found) > 1, "beside the best one"


def test_no_more_is_found_than_there_is_room_for(index: Index, codec: TextCodec):
    index.add(codec.encode_text("".join(f"{line}{STORY[:200]}\n" for line in NINE) + STORY))
    for most in range(1, 400, 3):
        found = index.search("What is the door code of falcon?", most, len)
        assert len("\n".join(passage.text for passage in found)) <= most
    assert index.search("falcon?", 0, size) == []


def test_words_that_are_everywhere_find_nothing(index: Index, codec: TextCodec):
    index.add(codec.encode_text(STORY))
    for question in ("Please go on with the story.", "Is that the weather of today?", "What is it?"):
        assert index.search(question, 500, size) == []
    (found,) = index.search("And line 217?", 500, size)
    assert "Line 217" in found.text


def test_equal_passages_are_found_once_and_an_echo_of_the_question_never(index: Index, codec: TextCodec):
    question = "What is the code of the gate?"
    index.add(codec.encode_text("The code of the gate is 1234 today, they say.\n" + STORY[:900] + "\n"))
    index.add(codec.encode_text(f"{question} What is the code of the gate?\n" * 70 + STORY))
    index.add(codec.encode_text("Nobody is at the gate, it says again.\n" * 20 + STORY[:300]))
    texts = [passage.text for passage in index.search(question, 500, size)]
    assert texts == ["The code of the gate is 1234 today, they say."]
    (found,) = index.search("Why is nobody at the gate?", 500, size)
    assert found.text == "Nobody is at the gate, it says again."


def test_a_question_behind_a_long_text_is_searched_for(index: Index, codec: TextCodec):
    index.add(codec.encode_text("The code of the gate is 1234 today, they say.\n" + STORY))
    pasted = " ".join(f"thing{n}" for n in range(200))
    (found,) = index.search(f"{pasted}\n\nWhat is the code of the gate?", 10, size)
    assert found.text.startswith("The code of the gate is 1234")


def test_the_best_passage_is_found_behind_many_others(index: Index, codec: TextCodec):
    """More than a few candidates are measured: long ones that do not fit leave room to others."""
    long = " ".join(f"gate gate gate {n}" for n in range(4))
    index.add(codec.encode_text("".join(f"{long} {n}\n" for n in range(48)) + STORY +
                                "Nobody stands at the gate today.\n" + STORY[:300]))
    (found,) = index.search("gate", 10, size)
    assert found.text == "Nobody stands at the gate today."


@pytest.mark.parametrize("private", [False, True])
def test_a_private_index_has_no_file(codec: TextCodec, monkeypatch: pytest.MonkeyPatch, private: bool):
    """SQLite may spill a database of the empty name to disk, and one of this name never."""
    opened, connect = list[str](), sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda name, **more: opened.append(name) or connect(name, **more))
    index = new(codec, private=private)
    index.copy().close()
    index.close()
    assert opened == [":memory:" if private else ""] * 2


def test_control_tokens_alone_end_a_passage_too(codec: TextCodec):
    control = next(iter(codec.control_ids))
    cutter = Cutter(codec, least=8, most=10)
    cuts = cutter.push([control] * 1000)
    assert max(len(cut.ids) for cut in cuts) <= 40 and len(cutter.ids) <= 40


def test_what_shares_common_words_alone_is_left_out(index: Index, codec: TextCodec):
    index.add(codec.encode_text("The door code of the library is 48213.\n" + STORY))
    found = index.search("What is the door code of the library?", 500, size)
    assert [passage.text for passage in found] == ["The door code of the library is 48213."]


@pytest.mark.parametrize(("question", "told", "update"), [
    ("When does the flight to Oslo leave?", "The flight to Oslo leaves at 8 from gate 4.",
     "The Oslo flight is delayed to 11."),
    ("What is the wifi password at the office?", "The wifi password at the office is swordfish.",
     "The wifi password changed to halibut."),
    ("What is the budget of project Apollo?", "The budget of project Apollo is 40,000 euros.",
     "Apollo's budget was raised to 60,000 euros."),
    ("When is the dentist appointment?", "The dentist appointment is on Monday at nine.",
     "The appointment moved to Friday."),
    ("Where does my sister Ann live?", "My sister Ann lives in Paris.", "My sister lives in Rome now."),
    ("Which books did Ann read?", "Ann read the book Emma in May.", "Ann read Ulysses in June.")])
def test_what_changed_is_found_though_it_lacks_a_word_of_the_question(index: Index, codec: TextCodec, question: str,
                                                                      told: str, update: str):
    index.add(codec.encode_text(f"{told}\n{STORY}{update}\n{STORY[:900]}"))
    assert [passage.text for passage in index.search(question, 500, size)] == [told, update]


def test_words_of_every_question_count_less(index: Index, codec: TextCodec):
    """In a text that hardly has them they would be worth as much as a name."""
    right, other = "Ann's pin was changed to 48213.", "Could you have been what he had before a new pin?"
    index.add(codec.encode_text(f"{other}\n{right}\n{STORY}"))
    found = index.search("Could you tell me what pin Ann had before?", size(other), size)
    assert [passage.text for passage in found] == [right]


@pytest.mark.parametrize("question", ["Could they?", "Could they, originally?"])
def test_words_of_every_question_are_searched_for_where_nothing_has_another(index: Index, codec: TextCodec,
                                                                            question: str):
    index.add(codec.encode_text(f"Could you be who they were before?\n{STORY}"))
    (found,) = index.search(question, 500, size)
    assert found.text == "Could you be who they were before?"


@pytest.mark.parametrize(("question", "right", "others"), [
    ("What is my name?", "My name is Bob Stone.", "The name of the {} is Bob Stone."),
    ("What is Will's phone number?", "Will's phone number is 48213.", "The {}'s phone number is 51300."),
    ("Which box is under the bed?", "The box under the bed is red.", "The box {} the bed is red.")])
def test_they_decide_where_all_else_is_equal(index: Index, codec: TextCodec, question: str, right: str, others: str):
    names = "cat dog ship river house street garden club".split()
    index.add(codec.encode_text("".join(f"{line}\n" for line in [right, *map(others.format, names)]) + STORY))
    (found,) = index.search(question, len(right.split()), size)
    assert found.text == right


@pytest.mark.parametrize(("question", "text"), [
    ("Bob's", "Whoever's this is knows it."), ("Bob’s", "It is Carl’s day."),
    ("l’eau de Bob", "Il sait qu’il a l’air mal.")])
def test_a_letter_beside_an_apostrophe_is_no_word(index: Index, codec: TextCodec, question: str, text: str):
    index.add(codec.encode_text(f"{text}\n{STORY}"))
    assert index.search(question, 500, size) == []
    index.add(codec.encode_text("The code x is what they gave to Bob.\nAnd an end"))
    (found,) = index.search(question, 500, size)
    assert found.text.endswith("to Bob.") and found in index.search("x's", 500, size)


@pytest.mark.parametrize("question", ["", "?!", '"', 'near("a b")', "code OR", "*", "a:b", "text : code", "-",
                                      "NOT code", "code\x00", "(", "^code", "日本", "x" * 9000, "word " * 500])
def test_a_question_is_no_query_language(index: Index, codec: TextCodec, question: str):
    index.add(codec.encode_text("The code of the gate is 1234, and a word beside it.\nAnd an end"))
    assert isinstance(index.search(question, 50, size), list)


def test_words_that_nothing_has(index: Index, codec: TextCodec):
    assert index.search("library", 10, size) == []
    index.add(codec.encode_text(STORY))
    assert index.search("library", 10, size) == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("least", "most"), [(8, 80), (3, 14), (1, 9)])
@pytest.mark.thorough(but=10)
def test_it_holds_what_it_was_given(codec: TextCodec, seed: int, least: int, most: int):
    """Adding, cutting back, following another stream, copying: as if the ids had been added at once."""
    def new() -> Index:
        return Index(lambda start: Cutter(codec, start=start, least=least, most=most))

    r = random.Random(seed)
    ends = [" ", ", ", "; ", ". ", "\n", ": ", ") ", " — ", "、"]
    text = codec.encode_text(STORY[:9000] + "".join(word + r.choice(ends) for word in STORY[:9000].split()))
    index, ids = new(), list[int]()
    for _ in range(12):
        step = r.random()
        if step < 0.5:
            more = text[(at := r.randrange(len(text) - 400)):at + r.randint(0, 400)]
            index.add(more)
            ids += more
        elif step < 0.75:
            end = r.choice([r.randint(0, len(ids) + 5), len(ids), 0])
            index.truncate(end)
            ids = ids[:end]
        elif step < 0.9:
            ids = ids[:r.randint(0, len(ids))] + text[:r.randint(0, 200)]
            index.add(ids[index.keep_shared(np.asarray(ids, "<i4")):])
        else:
            twin = index.copy()
            index.add(text[:50])
            index.close()
            index = twin
        fresh = new()
        fresh.add(ids)
        assert held(index) == held(fresh)
        assert index._ids_from(0) == ids and index.end == len(ids)
        fresh.close()
    index.close()


def test_several_threads_may_use_it(codec: TextCodec):
    index, ids, errors = new(codec), codec.encode_text(STORY), []

    def use(adds: bool):
        try:
            for n in range(60):
                index.add(ids[n * 20:n * 20 + 20]) if adds else index.search("line story cold", 30, size)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(n == 0,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and index.end == 1200
    index.close()


def test_nothing_has_a_name_on_disk(codec: TextCodec, tmp_path, monkeypatch):
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    index = new(codec)
    for _ in range(40):
        index.add(codec.encode_text(STORY))
    assert not list(tmp_path.iterdir())
    index.close()


def test_without_fts5_it_says_so(codec: TextCodec, monkeypatch):
    monkeypatch.setattr("locret_stream.recall.index._TABLES", "create virtual table words using fts9 (text)")
    with pytest.raises(ConfigError, match="recall needs SQLite with FTS5, and this Python's has no such module"):
        new(codec)
    assert sqlite3.sqlite_version


@pytest.mark.parametrize(("fact", "question", "others"), [
    ("图书馆的门禁密码是48213。", "图书馆的门禁密码是多少？", ["今天的天气很冷，港口没有船。", "市场的面包很新鲜。"]),
    ("図書館のドアコードは48213です。", "図書館のドアコードは何ですか？", ["今日は寒いです。", "港に船はありません。"]),
    ("도서관의 출입문 번호는 48213입니다.", "도서관 출입문의 번호가 무엇입니까?", ["춥습니다.", "배가 없습니다."]),
    ("猫の名前は48213です。", "猫?", ["今日は寒いです。", "港に船はありません。"])])
def test_languages_without_spaces(codec: TextCodec, fact: str, question: str, others: list[str]):
    index = Index(lambda start: Cutter(codec, start=start, least=8, most=200))
    index.add(codec.encode_text("\n".join([*others * 9, fact, *others * 9]) + "\nend"))
    (found,) = index.search(question, 60, lambda text: len(codec.encode_text(text)) // 3)
    assert found.text == fact
    whole = held(index)
    index.truncate(index.end - 20)  # what it searches by goes, too
    index.truncate(100)
    index.add(codec.encode_text("\n".join([*others * 9, fact, *others * 9]) + "\nend")[100:])
    assert held(index) == whole
    index.close()


def test_a_word_is_found_however_its_accents_are_written(index: Index, codec: TextCodec):
    index.add(codec.encode_text("The code of the r\u00e9sum\u00e9 is 48213.\n" + STORY))
    for form in "NFC", "NFD":
        (found,) = index.search(unicodedata.normalize(form, "What of the r\u00e9sum\u00e9?"), 12, size)
        assert "48213" in found.text


def test_a_private_index_puts_nothing_into_files(codec: TextCodec):
    """Where a search sorts more than fits SQLite's cache, too."""
    index, files, looks = new(codec, private=True), set(), []
    index._write(Cut(at * 64, [1] * 64, f"secret {at} alarm code " + "-" * 2500, at * 64 + 65) for at in range(1200))

    def look() -> int:
        looks.append(1)
        files.update(name for number in os.listdir("/proc/self/fd") if "etilqs" in (
            name := os.readlink(path) if os.path.lexists(path := f"/proc/self/fd/{number}") else ""))
        return 0

    index._db.set_progress_handler(look, 500)
    index.search("alarm code", 10, size)
    assert len(looks) > 10 and not files
    index.close()

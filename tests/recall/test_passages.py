"""Where passages are cut, and that it depends on the ids alone."""

from __future__ import annotations

import random
from datetime import datetime

import pytest

from locret_stream.recall import Cutter, headers, passages
from locret_stream.text import ChatFrame, TextCodec
from tests.training.tiny import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def codec(tokenizer) -> TextCodec:
    return TextCodec(tokenizer)


def cut(codec: TextCodec, ids, sizes=(10**9,), **more):
    cutter, done, at, turn = Cutter(codec, **more), [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        done += cutter.push(ids[at:at + size])
        at, turn = at + size, turn + 1
    return done, cutter


def test_passages_end_with_sentences_and_lines(codec: TextCodec):
    text = 'The first one is short. He said "Stop!" and left. It cost 3.14 in all.\nA line of a log\n\nAnd more. End'
    done, cutter = cut(codec, codec.encode_text(text), least=1)
    assert [passage.text for passage in done] == [
        "The first one is short.", 'He said "Stop!"', "and left.", "It cost 3.14 in all.", "A line of a log",
        "And more."]
    assert codec.decode(cutter.ids).strip() == "End"


def test_sentences_without_spaces_between_them(codec: TextCodec):
    done, _ = cut(codec, codec.encode_text("门的密码是四七一一。他说停！然后走了。End"), least=1)
    assert [passage.text for passage in done] == ["门的密码是四七一一。", "他说停！", "然后走了。"]


def test_passages_have_a_least_and_a_most(codec: TextCodec):
    ids = codec.encode_text("One. Two. Three. Four. Five. Six. Seven. Eight. " * 20)
    done, _ = cut(codec, ids, least=20, most=40)
    assert all(20 <= len(passage.ids) <= 40 and passage.text.endswith(".") for passage in done)
    done, _ = cut(codec, codec.encode_text("word " * 300), least=20, most=40)
    assert all(38 <= len(passage.ids) <= 40 and passage.text.endswith("word") for passage in done)


def test_a_long_sentence_is_cut_between_its_parts(codec: TextCodec):
    """Best behind a semicolon, then a comma, else between words: not in a word or a number, and not behind a colon."""
    def texts(text: str, **more: int) -> list[str]:
        done, cutter = cut(codec, codec.encode_text(text), **more)
        assert "".join(codec.decode(passage.ids) for passage in done) + codec.decode(cutter.ids) == text
        return [passage.text for passage in done]

    verse = "the weight of it was great; the code of the gate is 4711 and it was set on his head, and "
    assert texts(verse * 2, least=8, most=60)[:2] == [
        "the weight of it was great;", "the code of the gate is 4711 and it was set on his head,"]
    row = '{"machine": "mill", "serial": "88231", "hours": 412, "state": "running", "since": "noon"} and so on '
    for text in texts(row * 3, least=8, most=30):
        assert text.endswith(("on", ",", "}")), text
    for most in range(20, 40):
        for text in texts("a code: 12345678 " * 30, least=8, most=most):
            assert text.endswith(("a", "code", "12345678")), text


def test_a_sentence_does_not_end_behind_a_title_or_an_initial(codec: TextCodec):
    text = "The number of Mr. Hopkins is 83451. That of Dr. J. R. Smith is 4711. It is No. 5. "
    done, _ = cut(codec, codec.encode_text(text + "End"), least=1)
    assert [passage.text for passage in done] == [
        "The number of Mr. Hopkins is 83451.", "That of Dr. J. R. Smith is 4711.", "It is No. 5."]


@pytest.mark.parametrize("short", ["etc.", "e.g.", "i.e.", "e. g.", "approx.", "vs.", "No.", "et al.", "Fig.", "cf.",
                                   "J.", "Jr.", "5 p.m.", "vol.", "pp.", "Tel.", "incl.", "Nr.", "z. B.", "usw."])
def test_a_sentence_does_not_end_behind_an_abbreviation(codec: TextCodec, short: str):
    done, _ = cut(codec, codec.encode_text(f"It has screws, {short} Nails lie there. That one is metric. End"), least=1)
    assert [passage.text for passage in done] == [f"It has screws, {short} Nails lie there.", "That one is metric."]


def test_a_passage_ends_with_a_whole_character(codec: TextCodec):
    """Each of these is three or four tokens."""
    for text in ("जहाँखाने" * 40, "🦉🐟" * 40, "门的密码" * 40):
        done, cutter = cut(codec, codec.encode_text(text), least=20, most=40)
        assert all(40 <= len(passage.ids) <= 43 for passage in done) and len(done) > 3
        assert "".join(passage.text for passage in done) + codec.decode(cutter.ids) == text
    half = codec.encode_text("🦉")[:2]  # bytes that are no text
    done, _ = cut(codec, half * 100, least=20, most=40)
    assert all(len(passage.ids) <= 43 for passage in done) and len(done) > 3


@pytest.mark.parametrize("seed", range(60))
def test_they_depend_on_the_ids_alone(codec: TextCodec, tokenizer, seed: int):
    r = random.Random(seed)
    frame = ChatFrame(codec, tokenizer)
    ids = []
    for _ in range(60):
        words = ["Yes. ", "a line\n", "日本語。", "é" * 3, "12.5 ", "no, ", "so; ", "a: b ", "、"]
        ids += r.choice([codec.encode_text(r.choice(words)),
                         frame.begin()[0], [r.randrange(codec.vocab)], sorted(codec.added_ids)[:1]])
    tails = headers(frame.literal_runs, codec.control_ids)
    whole, last = cut(codec, ids, headers=tails, least=5, most=12)
    pieces, other = cut(codec, ids, [r.randint(1, 9) for _ in range(7)], headers=tails, least=5, most=12)
    assert whole == pieces and last.ids == other.ids and last.start == other.start
    assert [token for passage in whole for token in passage.ids] + last.ids == ids, "nothing is lost"
    at = 0
    for passage in whole:
        assert passage.start == at
        at += len(passage.ids)
    for number in range(len(whole)):
        begin = whole[number].start
        again, _ = cut(codec, ids[begin:], headers=tails, start=begin, least=5, most=12)
        assert again == whole[number:], "a passage begins as if nothing were before it"
        shorter, _ = cut(codec, ids[:whole[number].seen], headers=tails, least=5, most=12)
        assert shorter == whole[:len(shorter)] and len(shorter) > number, "its end depends on no more than it says"
        shorter, _ = cut(codec, ids[:whole[number].seen - 1], headers=tails, least=5, most=12)
        assert len(shorter) <= number, "and on no less"


def test_what_a_template_writes_is_no_text(codec: TextCodec, tokenizer):
    frame = ChatFrame(codec, tokenizer, acknowledge="OK.")
    ids, state = frame.begin("Be brief.")
    for said, reply in (("The code of the gate is 4711.", "Noted."), ("It rains.", "It does, and it is cold, too.")):
        opened, state = frame.open_user(state)
        ids += opened + codec.encode_text(said)
        closed, state = frame.close_user_and_prompt(state.with_content())
        ids += closed + codec.encode_text(reply)
        ends, state = frame.close_reply(state, ids[-4:])
        ids += ends
    ids += frame.open_user(state)[0]
    tails = headers(frame.literal_runs, codec.control_ids)
    done, _ = cut(codec, ids + codec.encode_text("x"), headers=tails, least=1)
    assert [passage.text for passage in done] == [
        "Be brief.", "The code of the gate is 4711.", "Noted.", "It rains.", "It does, and it is cold, too."]
    done, _ = cut(codec, ids + codec.encode_text("x"), headers=tails, least=24)
    assert done[0].text.splitlines()[:2] == ["Be brief.", "The code of the gate is 4711."]
    assert not any("user" in passage.text or "assistant" in passage.text for passage in done)


def test_a_message_may_begin_like_a_header(codec: TextCodec, tokenizer):
    """What is not wholly the template's is text."""
    frame = ChatFrame(codec, tokenizer)
    control = next(i for i in frame.begin()[0] if i in codec.control_ids)
    tails = headers(frame.literal_runs, codec.control_ids)
    tail = max(tails[control], key=len)
    ids = [control, *tail[:1], *codec.encode_text(" is written here.\n"), control, *tail,
           *codec.encode_text("Second.\nx")]
    done, _ = cut(codec, ids, headers=tails, least=1)
    said = "\n".join(passage.text for passage in done)
    if len(tail) > 1:
        assert said.startswith(codec.decode(list(tail[:1])).strip()) and "is written here." in said
    assert done[-1].text == "Second."


# -- a template that writes the date ------------------------------------------------------------------------------

DATED = (
    "{{ '<|im_start|>system\n' + %s + '<|im_end|>\n' }}{%% for m in messages %%}{%% if m.role != 'system' %%}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%% endif %%}{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '<|im_start|>assistant\n' }}{%% endif %%}")
DATES = {"in a sentence": "'Today is ' + strftime_now('%d %B %Y') + '.'", "at the end": "strftime_now('%Y-%m-%d')",
         "with points": "'It is the ' + strftime_now('%d. %B %Y.') + '.'", "alone": "strftime_now('%A')",
         "ahead of the words": "strftime_now('%H:%M:%S') + ' is the time. Be brief.'",
         "twice": "strftime_now('%d') + ' and ' + strftime_now('%Y') + ' are today.'",
         "and a system text": "'Today is ' + strftime_now('%d %B %Y') + '.\n'"
                              " + (messages[0].content if messages[0].role == 'system' else '')"}
DAYS = [datetime(1971, 1, 31, 23, 59, 59), datetime(2024, 12, 25, 0, 0, 0), datetime(2026, 11, 28, 12, 30, 1)]


@pytest.mark.parametrize("way", DATES)
def test_the_date_is_no_text_whatever_day_it_is(way: str, monkeypatch: pytest.MonkeyPatch):
    frames = []
    for day in DAYS:
        class Clock:
            now = staticmethod(lambda day=day: day)

        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
        monkeypatch.setattr("locret_stream.text.dated.datetime", Clock)
        known = make_tokenizer()
        known.chat_template = DATED % DATES[way]
        frames.append(ChatFrame(TextCodec(known), known))
    codec = TextCodec(known)
    found = []
    for written in frames:
        ids, state = written.begin("Be kind." if way == "and a system text" else None)
        ids = ids + codec.encode_text("The code of the gate is 4711. It is shut.")
        ids += written.close_user_and_prompt(state.with_content())[0] + codec.encode_text("Noted.\nx")
        for reading in frames:
            tails = headers(reading.literal_runs, codec.control_ids, reading.runs_at_other_times)
            done, _ = cut(codec, ids, headers=tails, least=1)
            pieces, _ = cut(codec, ids, (1, 3, 2), headers=tails, least=1)
            assert done == pieces and [token for passage in done for token in passage.ids] == ids[:-1]
            found.append([passage.text for passage in done])
    said = ["The code of the gate is 4711.", "It is shut.", "Noted."]
    assert all(texts == ["Be kind."] * (way == "and a system text") + said for texts in found)


def test_a_header_with_a_short_gap_ends_where_its_end_comes_first():
    """Behind it a message may follow; behind a long gap the same ids may still be of the header."""
    short, long = (1, passages.SHORT_GAP, 9), (1, passages.GAP, 9)
    for header in (short, long):
        assert passages._fits(header, [1, 5, 9], whole=True) and passages._fits(header, [1, 5, 6], whole=False)
    assert not passages._fits(short, [1, 5, 9, 7], whole=False)
    assert passages._fits(long, [1, 5, 9, 7], whole=False)

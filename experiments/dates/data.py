"""Written dates in four languages, with their ISO form and the positions of day, month and year.

No date is ever written so that it could be read in two ways:

- All dates lie within a hundred years, so that two digits name one year.
- A date of nothing but numbers is written only where day-month-year, month-day-year and year-month-day, as far as they
  give a date at all, give the same one: 25/12/1998 and 03/03/1998, but never 03/04/1998. With a year of four digits in
  front, month and day follow (ISO 8601).
- Beside the name of a month a year of two digits has an apostrophe, or is one that no day can be: 3 March '12, 3 March
  98, but never 3 March 12.

Shapes: N examples, S characters of a source, T = 11 tokens of a target.
"""

import string
import tomllib
import unicodedata
from collections.abc import Sequence
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tricycle.dataset import pad

FIRST, LAST = date(1950, 1, 1), date(2049, 12, 31)
N_VALIDATION, N_TEST = 1000, 2000  # dates of their own
NOTHING, DAY, MONTH, YEAR = range(4)  # the date field of a character
FIELDS = {"year": YEAR, "month": MONTH, "day": DAY}
ISO_FIELDS = np.array([YEAR] * 4 + [NOTHING] + [MONTH] * 2 + [NOTHING] + [DAY] * 2 + [NOTHING])  # (T,): 1998-03-03, end
ISO_ALPHABET = "0123456789-"
BEGIN, END = len(ISO_ALPHABET), len(ISO_ALPHABET) + 1
TARGET_VOCAB = len(ISO_ALPHABET) + 2
ALPHABET = string.ascii_letters + string.digits + " ,.'-/:" + "ÁÉÓÑÄÖÜÛÈÀÇÊáéóñäöüûèàçêíÍúÚôÔîÎº"
IGNORED = -1  # after the end of a target
SOURCE_VOCAB = len(ALPHABET) + 1  # 0 is padding
NUMBER = {character: number for number, character in enumerate(ALPHABET, 1)}
SEPARATORS = "/.- "
BETWEEN = " : "
BARE = 0.3  # of the examples stand alone, the others within other words


class Language(NamedTuple):
    """The words of a language: months, weekdays, forms of dates and filler words."""

    months: list[str]
    short_months: list[str]
    weekdays: list[str]
    short_weekdays: list[str]
    forms: list[str]  # templates of `write`; the numeric ones are in every language
    filler: list[str]  # words to put around a date, without digits and names of months or days


def _languages() -> dict[str, Language]:
    """Return {name: Language} from languages.toml; words split at spaces, the shared numeric forms added to lists."""
    tables = tomllib.loads(Path(__file__).with_name("languages.toml").read_text(encoding="utf-8"))
    numbers = tables.pop("numbers")["forms"]
    listed = lambda value: value.split() if isinstance(value, str) else value + numbers
    return {name: Language(**{key: listed(value) for key, value in words.items()}) for name, words in tables.items()}


LANGUAGES = _languages()


class Example(NamedTuple):
    """A text with a date, its ISO form, its language, and the date field of each character."""

    source: str  # the text
    fields: list[int]  # the field of each character: NOTHING, DAY, MONTH or YEAR
    iso: str  # the answer, such as 1998-03-03; several dates are concatenated
    language: str  # of the words; with several dates, of the last


# -------------------------------------------------------------------- one date
def possible_dates(first: str, second: str, third: str) -> set[date]:
    """Return the set of valid dates of digit strings: D-M-Y, M-D-Y, Y-M-D; years: 2 or 4 digits (4 first: only Y-M-D).

    A year has two digits or four; one of four in front is followed by month and day.
    """
    orders = [(first, second, third)] if len(first) == 4 else [(third, second, first), (third, first, second)]
    if len(first) == 2 and len(third) != 4:
        orders.append((first, second, third))
    days = set()
    for year, month, day in orders:
        if len(year) in (2, 4):
            try:
                days.add(date(full_year(int(year)) if len(year) == 2 else int(year), int(month), int(day)))
            except ValueError:
                continue  # no month 13, no 30 February
    return days


def full_year(two_digits: int) -> int:
    """Return the year from FIRST to LAST with these last two digits."""
    return 1900 + two_digits + (100 if 1900 + two_digits < FIRST.year else 0)


def is_unambiguous(form: str, day: date) -> bool:
    """Return whether a date written in this form can be read in only one way."""
    if form.count("_") == 2 and not form.startswith("{yyyy}"):
        return len(possible_dates(*(part.format(**numbers(day)) for part in form.split("_")))) == 1
    bare_year = "{yy}" in form and "'" not in form
    return not bare_year or day.year % 100 == 0 or day.year % 100 > 31


def numbers(day: date) -> dict[str, str]:
    """Return {"d", "dd", "m", "mm", "yy", "yyyy": digits as text} of a date, such as "dd": "03"."""
    return {
        "d": f"{day.day}",
        "dd": f"{day.day:02}",
        "m": f"{day.month}",
        "mm": f"{day.month:02}",
        "yy": f"{day.year % 100:02}",
        "yyyy": f"{day.year}",
    }


PARTS = {
    name: field
    for field, names in {DAY: "d dd ordinal", MONTH: "m mm month short", YEAR: "yy yyyy", NOTHING: "weekday wd"}.items()
    for name in names.split()
}


def ordinal(language: str, day: int) -> str:
    """Return the day of the month as an ordinal ("2nd", "1er", "1º") or, in most languages after 1, as digits."""
    if language == "English":
        ending = "th" if 10 < day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
        return f"{day}{ending}"
    return {"French": "1er", "Spanish": "1º"}[language] if day == 1 else str(day)


@cache
def split_form(form: str) -> list[tuple[str, str]]:
    """Return a form as pairs of a text and the name of the field that follows it, "" at the end."""
    return [(text, name or "") for text, name, _, _ in string.Formatter().parse(form)]


def write(day: date, language: str, form: str) -> tuple[str, list[int]]:
    """Return (date written in a template form, field of each character: NOTHING, DAY, MONTH or YEAR)."""
    words = LANGUAGES[language]
    texts = numbers(day) | {"month": words.months[day.month - 1], "short": words.short_months[day.month - 1]}
    texts["weekday"] = words.weekdays[day.weekday()]
    if "{wd}" in form:
        texts["wd"] = words.short_weekdays[day.weekday()]
    if "{ordinal}" in form:
        texts["ordinal"] = ordinal(language, day.day)
    source, fields = "", []
    for text, name in split_form(form):
        part = texts[name] if name else ""
        source += text + part
        fields += [NOTHING] * len(text) + [PARTS.get(name, NOTHING)] * len(part)
    return source, fields


def random_written_date(day: date, language: str, generator: np.random.Generator) -> tuple[str, list[int]]:
    """Return (date in a random unambiguous form, separator, accents and case; field of each character)."""
    forms = LANGUAGES[language].forms
    while not is_unambiguous(form := forms[generator.integers(len(forms))], day):
        pass  # some forms are clear for every date
    source, fields = write(day, language, form)
    source = source.replace("_", SEPARATORS[generator.integers(len(SEPARATORS))])
    style = generator.random(2)
    if style[0] < 0.15:
        source = "".join(unicodedata.normalize("NFD", character)[0] for character in source)
    if style[1] < 0.4:
        source = source.lower() if style[1] < 0.25 else source.upper()
    return source, fields


# -------------------------------------------------------------------- many
def example(day: date, length: int, generator: np.random.Generator) -> Example:
    """Return an Example in a random language, with filler words around the date up to `length` characters.

    Args:
        length: of the whole in characters; the date stands alone if it has no room for more, as with 0.
    """
    names = list(LANGUAGES)
    language = names[generator.integers(len(names))]
    source, fields = random_written_date(day, language, generator)
    room = length - len(source)
    if room > 0:
        before = int(generator.integers(room + 1))
        left = filler(language, before - 1, generator, True) + " " if before else ""
        right = " " + filler(language, room - before - 1, generator, False) if before < room else ""
        source, fields = left + source + right, [NOTHING] * len(left) + fields + [NOTHING] * len(right)
    return Example(source, fields, day.isoformat(), language)


def filler(language: str, length: int, generator: np.random.Generator, keep_end: bool) -> str:
    """Return `length` characters of random words; the last word may be cut, with `keep_end` the first."""
    words = LANGUAGES[language].filler
    chosen = [words[i] for i in generator.integers(len(words), size=max(0, length // 2 + 1))]
    text = " ".join(chosen)
    return text[len(text) - length :] if keep_end else text[: max(0, length)]


@cache
def split() -> tuple[list[date], list[date], list[date]]:
    """Return (training, validation, test): disjoint shuffled lists of all dates; cached, so do not change them."""
    days = [FIRST + timedelta(number) for number in range((LAST - FIRST).days + 1)]
    order = np.random.default_rng(5).permutation(len(days))
    test, validation, training = np.split(order, [N_TEST, N_TEST + N_VALIDATION])
    return tuple([days[i] for i in part] for part in (training, validation, test))  # type: ignore[return-value]


def examples(days: Sequence[date], n: int, lengths: tuple[int, int], generator: np.random.Generator) -> list[Example]:
    """Return n examples of one date each, alone or within text of a length in `lengths`; dates are used in turn.

    Args:
        lengths: (0, most) for dates of which BARE stand alone and the others in texts of up to `most` characters;
            (0, 0) for dates alone; (least, most) for texts with that range of characters.
    """
    least, most = lengths
    made = []
    for number in range(n):
        alone = most == 0 or (least == 0 and generator.random() < BARE)
        length = 0 if alone else int(generator.integers(max(least, 1), most + 1))
        made.append(example(days[number % len(days)], length, generator))
    return made


def multiple_date_examples(
    days: Sequence[date], n: int, counts: tuple[int, int], generator: np.random.Generator
) -> list[Example]:
    """Return n Examples of several dates in random languages, joined by BETWEEN; `iso` is concatenated.

    Args:
        counts: the fewest and the most dates of a text.
    """
    made, used = [], 0
    for _ in range(n):
        count = int(generator.integers(counts[0], counts[1] + 1))
        parts = [example(days[(used + i) % len(days)], 0, generator) for i in range(count)]
        used += count
        fields: list[int] = []
        for part in parts:
            fields += ([NOTHING] * len(BETWEEN) if fields else []) + part.fields
        source, iso = BETWEEN.join(part.source for part in parts), "".join(part.iso for part in parts)
        made.append(Example(source, fields, iso, parts[-1].language))
    return made


def encode(source: str) -> list[int]:
    """Return the token of each character; KeyError for a character that is not in ALPHABET."""
    return [NUMBER[character] for character in source]


def targets(examples: Sequence[Example]) -> np.ndarray:
    """Return the padded int64 targets (N, 1 + T): each answer between BEGIN and END, then IGNORED."""
    return pad([[BEGIN, *map(ISO_ALPHABET.index, one.iso), END] for one in examples], IGNORED)[0]


def decode(tokens: Sequence[int]) -> str:
    """Return the text of the generated tokens; BEGIN and END become "?"."""
    return "".join(ISO_ALPHABET[token] if token < BEGIN else "?" for token in tokens)

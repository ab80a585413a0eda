"""The commands of docs/gguf.md as a whole, with a tiny model; the files that they write run in llama.cpp."""

import json
import shlex
from itertools import islice

import pytest
from pages import ROOT, blocks_of
from test_programs import call, good
from tiny_models import lively_model, tiny_tokeniser

from tricycle.generate import generate
from tricycle.pretrained import load
from tricycle.pretrained.adapters import load_adapter
from tricycle.pretrained.gguf_writer import export_gguf

TRAINING = "--rank 4 --steps 20 --learning-rate 0.01 --eval-interval 10 --sample-tokens 0".split()


def page_commands() -> list[str]:
    (block,) = [block for block in blocks_of(ROOT / "docs" / "gguf.md") if block.commands()]
    return block.commands()


@pytest.mark.slow
def test_every_command_runs_and_llama_cpp_runs_the_results(tmp_path):
    pytest.importorskip("gguf")
    llama_cpp = pytest.importorskip("llama_cpp")
    export_gguf(lively_model(context_window=128), tiny_tokeniser(), tmp_path / "model.gguf", "Q8_0")
    lines = [{"messages": [said("user", f"sing {i}"), said("assistant", f"small birds {i}")]} for i in range(40)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    programs = [shlex.split(line) for line in page_commands()]
    assert [words[1] for words in programs] == ["install", "chat", "finetune", "chat", "export", "export"]
    for words in programs[1:]:
        more = {"finetune": TRAINING, "chat": ["--length", "3"]}.get(words[1], [])
        good(call("-m", *words, *more, folder=tmp_path))

    loaded = load(tmp_path / "model.gguf", "exact")
    prompt = loaded.tokeniser.chat([said("user", "sing 3")])
    before = list(generate(loaded.model, prompt, 12, temperature=0))
    load_adapter(loaded, tmp_path / "adapter.gguf")
    expected = list(generate(loaded.model, prompt, 12, temperature=0))
    assert expected != before
    files = {"model.gguf": {"lora_path": str(tmp_path / "adapter.gguf")}, "tuned.gguf": {}}
    for name, options in files.items():
        theirs = llama_cpp.Llama(str(tmp_path / name), n_ctx=128, n_threads=1, verbose=False, **options)
        tokens = list(islice(theirs.generate(prompt, temp=0.0, repeat_penalty=1.0), 12))
        theirs.close()
        # The adapter on the same blocks gives the same text; a merged model is rounded again.
        assert tokens == expected if options else tokens[:2] == expected[:2]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}

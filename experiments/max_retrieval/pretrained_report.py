"""Tables in Markdown, plots and an interactive page of adaptive temperature in a language model.

Shapes: L layers, H heads.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.figures import drawing
from experiments.shared.pages import write_page
from experiments.shared.program import Outcome
from experiments.shared.tables import cell, markdown
from tricycle.system.files import atomic_write
from tricycle_lab.plot import plot_curves

PAGE = Path(__file__).with_name("heads.html")
TITLES = {
    "largest": "the largest of n numbers",
    "name": "a name from n lines before",
    "table": "a key in a table of n rows",
}
PLAIN = "softmax"
N_LISTED = 12  # heads


def report(folder: Path, results: dict[str, Any]) -> Outcome:
    """Write plots, tables.md, heads.html, as far as parts exist; return (Markdown tables by title, file names)."""
    made = tables(results)
    with atomic_write(folder / "tables.md", text=True) as file:
        file.write("\n\n".join(f"## {title}\n\n{table}" for title, table in made.items()) + "\n")
    none_if_missing(lambda: plot_tasks(results, folder))
    none_if_missing(lambda: plot_texts(results, folder / "positions.png"))
    none_if_missing(lambda: plot_entropies(results, folder / "entropy.png"))
    none_if_missing(lambda: plot_heads(results, folder / "heads.png"))
    none_if_missing(lambda: write_page(PAGE, folder / "heads.html", page_data(results)))
    print(f"{results['seconds'] / 60:.0f} minutes")
    return made, ["results.json", "tables.md", "heads.html", "pictures"]


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the Markdown tables by title; tables with missing parts are left out, and a line printed for each."""
    makers = {
        "Accuracy, % of answers that are right as a whole": lambda: task_table(results, "accuracy", 1, 100),
        "Nats an answer": lambda: task_table(results, "nats"),
        "Perplexity by position": lambda: text_table(results),
        "Entropy by length": lambda: entropy_table(results),
        "Heads whose sharpness the tasks ask for most": lambda: head_table(results),
        "The start of ln n": lambda: start_table(results),
    }
    return {title: table for title, make in makers.items() if (table := none_if_missing(make))}


def none_if_missing(make: Callable[[], Any]) -> Any:
    """Return `make()`; on a KeyError, print which part is missing and return None."""
    try:
        return make()
    except KeyError as missing:
        print(f"left out, for this part is not there: {missing}")
        return None


# -------------------------------------------------------------------- what there is
def split_last(names: dict[str, Any]) -> list[str]:
    """Return the distinct names before the last comma, such as "heads, tasks" of "heads, tasks, 0"."""
    return list(dict.fromkeys(name.rpartition(", ")[0] for name in names))


def of_seeds(results: dict[str, Any], temperature: str, task: str, n: str, key: str) -> list[float]:
    """Return the value at `key` of each stored seed, for size `n` of a task; an empty list if there is none."""
    parts = [value for name, value in results["tasks"].items() if name.rpartition(", ")[0] == temperature]
    tables = [{str(size): numbers for size, numbers in part.get(task, {}).items()} for part in parts]
    return [table[n][key] for table in tables if n in table]


def sizes_of(results: dict[str, Any], task: str) -> list[str]:
    """Return the sizes of a task in the results, as strings; an empty list if the task is missing."""
    return [str(n) for n in next(iter(results["tasks"].values())).get(task, {})]


def layers(results: dict[str, Any], key: str, text: str = "shakespeare") -> tuple[list[int], np.ndarray]:
    """Return the lengths, and `key` ("entropy" or "first") of each head with plain softmax, (lengths, L, H).

    The results are those beyond the model's context window if there are any.

    Raises:
        KeyError: the part is missing.
    """
    value = results.get("beyond", {}).get(f"{PLAIN}, {text}") or results["text"][f"{PLAIN}, {text}"]
    return value["lengths"], np.array(value[key])


def entropy_slopes(lengths: list[int], entropies: np.ndarray) -> np.ndarray:
    """Return the slope of the entropy against ln(length), (L, H): 1 for uniform attention, 0 for constant sharpness."""
    x = np.log(np.array(lengths))
    x = x - x.mean()
    return np.einsum("n,nlh->lh", x, entropies - entropies.mean(axis=0)) / max(x @ x, 1e-9)  # 0 of one length


def entropy_slopes_within_window(results: dict[str, Any]) -> np.ndarray:
    """Return `entropy_slopes` (L, H) for lengths within the context window; KeyError if the part is missing."""
    value = results["text"][f"{PLAIN}, shakespeare"]
    return entropy_slopes(value["lengths"], np.array(value["entropy"]))


# -------------------------------------------------------------------- tables
def task_table(results: dict[str, Any], key: str, digits: int = 2, scale: float = 1) -> str:
    """Return a Markdown table of `scale` times "accuracy" or "nats" (`key`): tasks and sizes by temperature."""
    names = split_last(results["tasks"])
    rows = []
    for task, title in TITLES.items():
        for n in sizes_of(results, task):
            values = [of_seeds(results, name, task, n, key) for name in names]
            rows.append([f"{title}: {n}", *(cell(v, digits, scale) if v else "" for v in values)])
    return markdown(["task", *names], rows)


def text_table(results: dict[str, Any]) -> str:
    """Return a Markdown table of perplexity by token range and added nats by temperature; "" without results."""
    names = split_last(results.get("text", {}))
    rows = []
    for kind in ("text", "beyond"):
        for text in dict.fromkeys(name.rpartition(", ")[2] for name in results.get(kind, {})):
            found = {name: results[kind].get(f"{name}, {text}") for name in names}
            plain = found[PLAIN]
            for i, high in enumerate(plain["lengths"]):
                low = plain["lengths"][i - 1] if i else 0
                others = [found[name] for name in names if name != PLAIN]
                shifts = [f"{other['nats'][i] - plain['nats'][i]:+.3f}" if other else "" for other in others]
                if kind == "text" or high == plain["lengths"][-1]:
                    rows.append([f"{text}, {low + 1:,} to {high:,}", f"{np.exp(plain['nats'][i]):.2f}", *shifts])
    return markdown(["tokens", f"{PLAIN}, perplexity", *(n for n in names if n != PLAIN)], rows) if rows else ""


def entropy_table(results: dict[str, Any]) -> str:
    """Return a Markdown table by length of the heads' entropies in nats and the weight on the first token."""
    lengths, entropies = layers(results, "entropy")
    first = layers(results, "first")[1]
    rows = []
    for i, n in enumerate(lengths):
        quarters = np.percentile(entropies[i], (10, 50, 90))
        spread = entropies[i].mean() / np.log(n)
        shares = [f"{value:.2f}" for value in (np.log(n), entropies[i].mean(), *quarters, spread, first[i].mean())]
        rows.append([f"{n:,}", *shares])
    titles = ["length", "ln n", "mean", "10th percentile", "median", "90th percentile", "mean / ln n"]
    return markdown([*titles, "on the first token"], rows)


def head_table(results: dict[str, Any]) -> str:
    """Return a Markdown table of the 12 heads ("layer.head") whose task-loss gradient is most negative."""
    beta_gradients = {name: np.array(rows) for name, rows in results["fit"]["slopes"].items()}
    tasks, text = beta_gradients["tasks"].mean(axis=0), beta_gradients["text"].mean(axis=0)
    grows = entropy_slopes_within_window(results)
    fitted = [name for name in ("heads, tasks", "heads, text") if name in results["fit"]]
    betas = {name: np.exp(results["fit"][name]["levels"]) for name in fitted}
    rows = []
    for place in np.argsort(tasks, axis=None)[:N_LISTED]:
        at = layer, head = divmod(int(place), tasks.shape[1])
        each = beta_gradients["tasks"][:, layer, head]
        signs = f"{tasks[at]:+.4f} ± {each.std(ddof=1) if len(each) > 1 else np.nan:.4f}"
        others = [f"{beta[at]:.2f}" for beta in betas.values()]
        rows.append([f"{layer}.{head}", signs, f"{text[at]:+.4f}", *others, f"{grows[at]:.2f}"])
    names = [f"beta, {name.partition(', ')[2]}" for name in betas]
    titles = ["head", "slope, tasks", "slope, text", *names, "entropy / ln n"]
    return markdown(titles, rows)


def start_table(results: dict[str, Any]) -> str:
    """Return a Markdown table of the loss of answers in nats for each start of ln n, and for plain softmax."""
    found = results["fit"]["ln n"]
    rows = [[start, f"{loss:.3f}"] for start, loss in {**found["losses"], "softmax": found["softmax"]}.items()]
    return markdown(["start", "loss of answers"], rows)


# -------------------------------------------------------------------- pictures
def plot_tasks(results: dict[str, Any], folder: Path) -> None:
    """Write accuracy.png (in %) and nats.png into a folder: curves against n, one panel for each task."""
    names = split_last(results["tasks"])
    for key, label, scale in (("accuracy", "correct answers, %", 100), ("nats", "nats per answer", 1)):
        panels: dict[str, dict[str, tuple[Any, Any]]] = {}
        for task, title in TITLES.items():
            sizes = sizes_of(results, task)
            for name in names:
                values = [of_seeds(results, name, task, n, key) for n in sizes]
                n_seeds = min(map(len, values), default=0)
                ys = scale * np.array([column[:n_seeds] for column in values]).T
                if n_seeds:
                    panels.setdefault(title, {})[name] = np.array(sizes, int), ys
        plot_curves(panels, folder / f"{key}.png", "n", label, log="x", share_y=key == "accuracy")


def plot_texts(results: dict[str, Any], path: Path) -> None:
    """Write a PNG of the nats each temperature adds by position, one panel per text; no file without results."""
    panels: dict[str, dict[str, tuple[Any, Any]]] = {}
    for name, value in results.get("text", {}).items():
        temperature, _, text = name.rpartition(", ")
        plain = results["text"].get(f"{PLAIN}, {text}")
        if temperature != PLAIN and "polynomial" not in temperature and plain:
            shift = np.array(value["nats"]) - np.array(plain["nats"])
            panels.setdefault(text, {})[temperature] = np.array(value["lengths"]), shift
    if panels:
        plot_curves(panels, path, "up to token", "added loss, nats per token", log="x")


def plot_entropies(results: dict[str, Any], path: Path) -> None:
    """Write a PNG of each head's entropy in nats, and its weight on the first token, against the length."""
    lengths, entropies = layers(results, "entropy")
    first = layers(results, "first")[1]
    with drawing(path, (12, 4.8), dpi=90) as figure:
        left, right = figure.subplots(1, 2)
        grows = entropy_slopes_within_window(results).ravel()
        import matplotlib

        shades = matplotlib.colormaps["viridis"](np.clip(grows, 0, 1))
        for axes, values in ((left, entropies), (right, first)):
            for line, shade in zip(values.reshape(len(lengths), -1).T, shades):
                axes.plot(lengths, line, color=shade, linewidth=0.7, antialiased=False)
            axes.plot(
                lengths, values.mean(axis=(1, 2)), "o-", color="#d55e00", linewidth=2.2, label="mean of all heads"
            )
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [f"{n:,}" for n in lengths], fontsize=8)
            axes.set_xlabel("tokens")
            axes.grid(alpha=0.25)
        left.plot(lengths, np.log(lengths), "--", color="black", label="ln n: uniform weights")
        left.set_ylabel("entropy of the weights, nats")
        right.set_ylabel("attention weight on the first token")
        left.legend(frameon=False)
        scale = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, 1), "viridis")
        figure.colorbar(scale, ax=right, label="entropy / ln n")


def plot_heads(results: dict[str, Any], path: Path) -> None:
    """Write a PNG of 3 or 4 maps, layer by head: entropy slopes, loss slopes of tasks and texts, fitted betas."""
    fit = results["fit"]
    maps: dict[str, Any] = {
        "slope of the entropy by ln n (1: uniform)": (entropy_slopes_within_window(results), "viridis", 0, 1),
        "slope of the answers' loss by ln beta (blue: sharper is better)": (_mean(fit["slopes"]["tasks"]), "coolwarm"),
        "slope of the texts' loss by ln beta": (_mean(fit["slopes"]["text"]), "coolwarm"),
    }
    if "heads, tasks" in fit:
        maps["beta fitted to tasks"] = np.exp(fit["heads, tasks"]["levels"]), "coolwarm_r", 0.5, 1.5
    with drawing(path, (11, 2.25 * len(maps)), dpi=100) as figure:
        for axes, (title, (values, color_map, *limits)) in zip(figure.subplots(len(maps), 1), maps.items()):
            extent = np.percentile(abs(values), 98) or 1
            low, high = limits or (-extent, extent)
            image = axes.imshow(np.array(values).T, cmap=color_map, vmin=low, vmax=high, aspect="auto")
            axes.set_title(title, fontsize=10)
            axes.set_ylabel("head")
            figure.colorbar(image, ax=axes)
        axes.set_xlabel("layer")


def _mean(rows: Any) -> np.ndarray:
    """Return the mean of rows over the first axis."""
    return np.array(rows).mean(axis=0)


# -------------------------------------------------------------------- the page
def page_data(results: dict[str, Any]) -> dict[str, Any]:
    """Return "lengths", "heads" (L, H) by measure, "curves" (lengths, L, H) and "tasks" by title, for the page."""
    fit = results["fit"]
    lengths = layers(results, "entropy")[0]
    heads = {
        "growth": np.round(entropy_slopes_within_window(results), 3).tolist(),
        "slope, tasks": np.round(_mean(fit["slopes"]["tasks"]), 5).tolist(),
        "slope, text": np.round(_mean(fit["slopes"]["text"]), 5).tolist(),
    }
    for name in ("tasks", "text"):
        if f"heads, {name}" in fit:
            heads[f"beta, {name}"] = np.round(np.exp(fit[f"heads, {name}"]["levels"]), 3).tolist()
    names = split_last(results["tasks"]) if "tasks" in results else []
    tasks = {
        title: {
            "sizes": sizes_of(results, task),
            "lines": {
                name: [round(100 * float(np.mean(of_seeds(results, name, task, n, "accuracy"))), 1) for n in sizes]
                for name in names
            },
        }
        for task, title in TITLES.items()
        if names and (sizes := sizes_of(results, task))
    }
    curves = {key: layers(results, key)[1].tolist() for key in ("entropy", "first")}
    return {"lengths": lengths, "heads": heads, "curves": curves, "tasks": tasks}

"""How exactly matrix products are made, and what activations are kept in. Weights are float32 always.

Of activations a GPU keeps all in 16 bits where products take no more; a CPU those that go from one product to the next,
and the logits that training makes its loss of.

A model has one precision. It stands in its config, `Layer.use_precision` hands it to every layer, and the two places
where products are made take it: `functions.linear` and `attention.Attention`.
"""

PRECISIONS = ("float32", "tf32", "bfloat16", "float16")


def check_precision(precision: str) -> str:
    """The name of a precision as it is.

    Raises:
        ValueError: an unknown name.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"expected precision to be one of {', '.join(PRECISIONS)}, got {precision!r}")
    return precision

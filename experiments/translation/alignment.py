"""The attention weights of a translation."""

from typing import Any

from experiments.translation.study import translate
from tricycle.sequences.seq2seq import EncoderDecoder, Seq2SeqAttention, Transformer
from tricycle.sequences.translators import Vocabulary
from tricycle.tensor import no_grad
from tricycle_lab.probe import Probe

# Validation sentences, by their place: they have clauses whose order differs between English and German or French.
SHOWN = (867, 774, 504)


def translate_with_attention(
    model: EncoderDecoder, vocabulary: Vocabulary, sentence: str, beam_size: int = 5
) -> dict[str, Any]:
    """Return "sentence", "translation", "source" (S) and "target" (T) tokens, and "weights" (T, S) by layer.

    Returns:
        source: S texts of tokens. target: T of them, <end> last. weights: by the name of a layer (T, S) lists, the mean
        of its heads; an empty dict for a model without attention.
    """
    (translation,) = translate(model, vocabulary, [sentence], beam_size, progress=False)
    batch = vocabulary.batch([vocabulary.encode(sentence)], [vocabulary.encode(translation)])
    weights = {}
    with no_grad():
        state = model.start_decoding(batch.source, batch.lengths)
        if isinstance(model, Transformer):
            with Probe(model, "decoder.blocks.*.cross") as probe:
                model.decode(batch.target, state)
            weights = {f"layer {i + 1}": array[0].mean(axis=0) for i, array in enumerate(probe.weights.values())}
        elif isinstance(model, Seq2SeqAttention):
            model.decode(batch.target, state)
            weights = {"attention": state["weights"].array[0]}
    return {
        "sentence": sentence,
        "translation": translation,
        "source": vocabulary.texts(batch.source[0]),
        "target": [*vocabulary.texts(batch.labels[0][:-1]), "<end>"],
        "weights": {name: [[round(float(x), 3) for x in row] for row in array] for name, array in weights.items()},
    }

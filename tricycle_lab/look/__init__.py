"""HTML pages of `tricycle look` and `tricycle bench`: model viewer, run comparison, computation graph, softmaxes."""

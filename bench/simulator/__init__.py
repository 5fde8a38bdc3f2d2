"""Request traces replayed against simulated workers, with the router's own index, load table and policy in charge.

One noun per file: traces and their loaders, the cache and the worker, the clock and its channels, the replay, the
report. Simulated seconds only; nothing here opens a socket or runs a model. docs/routing.md says what is assumed.
"""

"""The model runner, in one process or over several ranks."""

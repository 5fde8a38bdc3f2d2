"""The shell of one draft-target pair: admission, streams, supervision, metrics."""

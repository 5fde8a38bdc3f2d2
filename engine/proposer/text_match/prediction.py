"""The client's own prediction as the draft (OpenAI's predicted outputs): edits repeat most of their input."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from weakref import WeakValueDictionary

from engine.draft import DraftSource
from engine.proposer.text_match.text_matcher import TextMatch
from engine.sequence.request_tokens import RequestTokens
from protos.predicted_text import PredictedText, Prediction


class _Following:
    """One sequence's prediction, and how far its output has been compared with it."""

    def __init__(self, sequence: RequestTokens, prediction: Prediction) -> None:
        self.text = PredictedText(prediction)
        self.num_read = sequence.num_prompt_tokens
        self.num_in_step = 0  # tokens since the output last strayed from the prediction

    def read(self, token_ids: Seq[int]) -> None:
        self.num_read += len(token_ids)
        for token_id in token_ids:
            before = self.text.position
            self.text.read((token_id,))
            is_in_step = before is not None and self.text.position == before + 1
            self.num_in_step = self.num_in_step + 1 if is_in_step else 0


class PredictionMatcher:
    """A `TextMatcher` for what the request's prediction says next, as long as the output agrees with it.

    The prediction must not know the noise that will verify it: with verification other than `coupled`, a text that was
    sampled with the same seed would bias the output (the ingress refuses a prediction beside a seed there).
    """

    source = DraftSource.PREDICTION

    def __init__(self) -> None:
        self._following: dict[str, _Following] = {}
        # One for all choices of a request. Tenants share none: its time would tell of the other's.
        self._predictions: WeakValueDictionary[tuple[str, tuple[int, ...]], Prediction] = WeakValueDictionary()

    def is_for(self, sequence: RequestTokens) -> bool:
        """True if the request came with a prediction."""
        return bool(sequence.request.prediction_token_ids)

    def open(self, sequence: RequestTokens) -> None:
        """Begin with the whole prediction ahead."""
        key = sequence.request.tenant, sequence.request.prediction_token_ids
        prediction = self._predictions.get(key)
        if prediction is None:
            prediction = self._predictions[key] = Prediction(sequence.request.prediction_token_ids)
        self._following[sequence.request_id] = _Following(sequence, prediction)

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """Compare the new tokens with the prediction."""
        for sequence in sequences:
            following = self._following.get(sequence.request_id)
            if following is not None:
                following.read(sequence.token_ids[following.num_read :])

    def close(self, request_id: str) -> None:
        """Forget the sequence."""
        self._following.pop(request_id, None)

    def match(self, sequence: RequestTokens, max_tokens: int) -> TextMatch | None:
        """Return what the prediction says next; None where the output has left it."""
        following = self._following.get(sequence.request_id)
        token_ids = following.text.next(max_tokens) if following is not None else ()
        if following is None or not token_ids:
            return None
        return TextMatch(token_ids, following.num_in_step)

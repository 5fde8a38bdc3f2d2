"""The text of one choice as it grows: from token chunks to thoughts, and text that may be shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum, auto

from protos.messages import FinishReason, GenerateRequest, TokenChunk
from router.generation.delta import Delta
from router.generation.tool_formats.whole_format import CALL_BEGIN, CALL_END, CHANNEL, END_MARKS, MESSAGE
from router.requests.reasoning_format import HARMONY, Thinking
from router.tokenizer import Detokenizer, Tokenizer, make_detokenizer

_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_PAUSE = "\n\n"  # between two messages of a kind

DetokenizerMaker = Callable[[Tokenizer, Sequence[int]], Detokenizer]


class StopStrings:
    """Watches a growing text for the first stop string to be completed; holds back what may become part of one.

    The outcome does not depend on how the text is cut into pieces. Of two stop strings that end at the same character
    the longer one counts.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = sorted(stop_strings, key=len, reverse=True)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add a piece of text; return text that may be shown, and the stop string that ended the text, if one did.

        After a match push nothing more.
        """
        text = self._held + piece
        match = self._first_completed(text)
        if match is not None:
            self._held = ""
            return text[: text.index(match)], match
        num_shown = len(text) - self._num_held(text)
        self._held = text[num_shown:]
        return text[:num_shown], None

    def flush(self) -> str:
        """The text held back, once nothing follows it."""
        text, self._held = self._held, ""
        return text

    def _first_completed(self, text: str) -> str | None:
        found = [stop for stop in self._stop_strings if stop in text]
        return min(found, key=lambda stop: text.index(stop) + len(stop), default=None)

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop_strings):
                return length
        return 0


class _MessagePart(Enum):
    """A part of a message."""

    HEAD = auto()
    THOUGHT = auto()
    ANSWER = auto()
    CALL = auto()


class HarmonyReader:
    """Sorts the tokens of an answer into thoughts, answer and calls.

    A message is a head, up to `<|message|>`, that names a channel and perhaps a recipient, and a text up to the next
    mark. Messages on the channel analysis are thoughts, messages to a function are calls. Any other recipient is a tool
    that is not run here, and its message is a thought. The head may name channel and recipient in either order:
    `replacement` has the head of a call in the order that its tool format parses.
    """

    def __init__(self, thinking: Thinking, tokenizer: Tokenizer) -> None:
        """Begin inside the message that the prompt left open."""
        self._tokenizer = tokenizer
        self._has_tools = thinking.has_tools
        self._channel_id = tokenizer.token_id(CHANNEL)
        self._message_id = tokenizer.token_id(MESSAGE)
        self._end_ids = {tokenizer.token_id(mark) for mark in END_MARKS} - {None}
        self._part = _MessagePart.HEAD
        self._head = ""
        self._num_head = 0
        self._seen_parts: set[_MessagePart] = set()
        self.replacement = ""  # text that replaces the mark
        self.num_tokens = 0  # of thoughts, their heads and marks included
        for token_id in thinking.head_ids:
            self.take(token_id)
        self.replacement, self.num_tokens, self._num_head = "", 0, 0
        self._seen_parts.clear()

    @property
    def is_thinking(self) -> bool:
        """True in a thought."""
        return self._part is _MessagePart.THOUGHT

    def take(self, token_id: int) -> bool:
        """Take the next token; return True if it is a mark: part of a head, or the end of a message."""
        self.replacement = ""
        self.num_tokens += self.is_thinking
        is_end = token_id in self._end_ids
        if is_end or (token_id == self._channel_id and self._part is not _MessagePart.HEAD):
            self._end_message()
        if self._part is not _MessagePart.HEAD:
            return False
        self._num_head += 1
        if token_id == self._message_id:
            self._begin_text()
        elif not is_end:
            self._head += self._tokenizer.token_text(token_id)
        return True

    def _end_message(self) -> None:
        self.replacement = CALL_END if self._part is _MessagePart.CALL else ""
        self._part, self._head, self._num_head = _MessagePart.HEAD, "", 0

    def _begin_text(self) -> None:
        recipient = match[1] if (match := _RECIPIENT.search(self._head)) else ""
        channel = match[1] if (match := _CHANNEL.search(self._head)) else ""
        if recipient.startswith(_FUNCTIONS) and self._has_tools:
            self._part = _MessagePart.CALL
            self.replacement = f"{CALL_BEGIN}{recipient.removeprefix(_FUNCTIONS)}{MESSAGE}"
            return
        self._part = _MessagePart.THOUGHT if recipient or channel == "analysis" else _MessagePart.ANSWER
        self.replacement = _PAUSE if self._part in self._seen_parts else ""
        self._seen_parts.add(self._part)
        if self.is_thinking:
            self.num_tokens += self._num_head


class ThoughtReader:
    """Sorts the tokens of an answer into thought and answer; marks are neither."""

    replacement = ""  # no text replaces a mark

    def __init__(self, thinking: Thinking, tokenizer: Tokenizer) -> None:
        self._format = thinking.format
        self._tokenizer = tokenizer
        self._may_begin = not thinking.is_open
        self.is_thinking = thinking.is_open
        self.num_tokens = 0  # of the thought, its marks included

    def take(self, token_id: int) -> bool:
        """Take the next token; return True if it is a mark: the beginning or the end of the thought."""
        if self.is_thinking:
            self.num_tokens += 1
            self.is_thinking = token_id != self._format.end_id
            return not self.is_thinking
        if self._may_begin:
            if token_id == self._format.begin_id:
                self.num_tokens += 1
                self._may_begin, self.is_thinking = False, True
                return True
            self._may_begin = not self._tokenizer.token_text(token_id).strip()
        return False


class Trimmed:
    """A text that grows, without the white space around it: what may turn out to be its end is held back."""

    def __init__(self, label: str = "", *, has_begun: bool = False) -> None:
        """`label` is left out where the text begins with it; a text that `has_begun` elsewhere has neither."""
        self._label = "" if has_begun else label
        self._has_begun = has_begun
        self._held = ""

    def push(self, piece: str) -> str:
        """Return the text known for certain to be inside."""
        text = self._held + piece
        if self._label.startswith(text):
            self._held = text
            return ""
        text = text.removeprefix(self._label)
        self._label = ""
        text = text if self._has_begun else text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        self._has_begun |= bool(shown)
        return shown


class ChoiceText:
    """Detokenizes one sequence, watches for stop strings, and cuts at them.

    Tokens are taken one by one, so the text, the tokens kept and the finish reason do not depend on how many tokens a
    step committed. With `thinking`, the model's thought is the deltas' `reasoning`, and stop strings are matched only
    after it.
    """

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        tokenizer: Tokenizer,
        *,
        stop_strings: Sequence[str] = (),
        num_echoed_characters: int = 0,
        includes_stop: bool = False,
        thinking: Thinking | None = None,
        new_detokenizer: DetokenizerMaker = make_detokenizer,
    ) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._min_tokens = request.sampling.min_tokens
        self._new_detokenizer = new_detokenizer
        self._detokenizer = new_detokenizer(tokenizer, request.prompt_token_ids)
        self._thoughts = _new_reader(thinking, tokenizer) if thinking else None
        self._shows_thoughts = thinking is not None and thinking.is_shown
        is_continued = thinking is not None and thinking.is_continued
        self._thought = Trimmed(thinking.format.label if thinking else "", has_begun=is_continued)
        # White space around a thought is not shown.
        self._awaits_text = self._thoughts is not None and (self._thoughts.is_thinking or not is_continued)
        self._stop_strings = StopStrings(stop_strings) if stop_strings else None
        self._includes_stop = includes_stop
        self.stop_string: str | None = None  # the stop string that ended the text
        self._num_tokens = 0
        self._num_characters = num_echoed_characters
        self.is_finished = False

    def feed(self, chunk: TokenChunk) -> Delta:
        """Return the delta of one chunk. After a delta with a finish reason nothing more may be fed."""
        assert not self.is_finished
        texts, offsets = [], []
        thoughts: list[str] = []
        num_thought_before = self._num_thought
        finish_reason = None
        # Token by token, so that a stop string ends the text at the same token for any chunks.
        for rank, token_id in enumerate(chunk.token_ids):
            offsets.append(self._num_characters)
            is_stop_token = chunk.stop_token_id is not None and rank == len(chunk.token_ids) - 1
            is_hidden = is_stop_token and not self._includes_stop
            text, is_stopped = ("", False) if is_hidden else self._read(token_id, thoughts)
            texts.append(text)
            if is_stopped:
                finish_reason = FinishReason.STOP
                break
        # The end releases text held back for an incomplete character or stop string.
        if finish_reason is None and chunk.finish_reason is not None:
            text, is_stopped = self._flush(thoughts)
            texts.append(text)
            finish_reason = FinishReason.STOP if is_stopped else chunk.finish_reason
        self.is_finished = finish_reason is not None
        num_kept = len(offsets)
        return Delta(
            index=self._index,
            text="".join(texts),
            reasoning="".join(thoughts) if self._shows_thoughts else "",
            num_reasoning_tokens=self._num_thought - num_thought_before,
            token_ids=chunk.token_ids[:num_kept],
            logprobs=chunk.logprobs[:num_kept],
            text_offsets=tuple(offsets) if chunk.logprobs else (),
            finish_reason=finish_reason,
            stop_string=self.stop_string,
            sources=chunk.sources[:num_kept],
            draft_ids=chunk.draft_ids,
            draft_text=self._tokenizer.decode(chunk.draft_ids) if chunk.draft_ids else "",
        )

    @property
    def thinks_once(self) -> bool:
        """True if no thought can follow a text: only messages on channels have more than one."""
        return not isinstance(self._thoughts, HarmonyReader)

    @property
    def _num_thought(self) -> int:
        return self._thoughts.num_tokens if self._thoughts else 0

    def _read(self, token_id: int, thoughts: list[str]) -> tuple[str, bool]:
        """Return a token's text, and true if it stopped there; append thoughts to `thoughts`."""
        self._num_tokens += 1
        was_thinking = self._thoughts is not None and self._thoughts.is_thinking
        if self._thoughts is not None and self._thoughts.take(token_id):
            return self._pass_mark(self._thoughts, thoughts, was_thinking=was_thinking)
        text = self._detokenizer.push(token_id)
        if not was_thinking:
            return self._scan(text)
        thoughts.append(self._thought.push(text))
        return "", False

    def _pass_mark(
        self, reader: ThoughtReader | HarmonyReader, thoughts: list[str], *, was_thinking: bool
    ) -> tuple[str, bool]:
        """End the thought or text before a mark, and begin the next one with the text that replaces the mark."""
        before = self._detokenizer.flush()
        self._detokenizer = self._new_detokenizer(self._tokenizer, ())
        text = ""
        for piece, is_thought in ((before, was_thinking), (reader.replacement, reader.is_thinking)):
            if is_thought:
                thoughts.append(self._thought.push(piece))
            else:
                text += piece
        return self._scan(text)

    def _flush(self, thoughts: list[str]) -> tuple[str, bool]:
        if self._thoughts is not None and self._thoughts.is_thinking:
            thoughts.append(self._thought.push(self._detokenizer.flush()))
            return "", False
        text, is_stopped = self._scan(self._detokenizer.flush())
        if self._stop_strings is None or is_stopped:
            return text, is_stopped
        return text + self._stop_strings.flush(), False

    def _scan(self, piece: str) -> tuple[str, bool]:
        """Return the text that may be shown, and true if a stop string ended it; none counts before `min_tokens`."""
        if self._awaits_text:
            piece = piece.lstrip()
            self._awaits_text = not piece
        self._num_characters += len(piece)
        if self._stop_strings is None or self._num_tokens < self._min_tokens:
            return piece, False
        text, stop_string = self._stop_strings.push(piece)
        self.stop_string = stop_string
        return text + (stop_string or "") if self._includes_stop else text, stop_string is not None


def _new_reader(thinking: Thinking, tokenizer: Tokenizer) -> ThoughtReader | HarmonyReader:
    is_harmony = thinking.format.name == HARMONY
    return HarmonyReader(thinking, tokenizer) if is_harmony else ThoughtReader(thinking, tokenizer)

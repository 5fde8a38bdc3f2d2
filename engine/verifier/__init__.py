"""Verifiers turn the target's rows and a draft into committed tokens, distributed exactly as the target alone.

Vocabulary: *accepted* tokens are drafts that stand; the *recovered* token replaces the first draft that does not; the
*bonus* token follows when all drafts stand. One pass commits the accepted tokens and one recovered or bonus token.
"""

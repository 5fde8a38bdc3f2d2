"""The checks: sampling, later positions, comparisons of two ways to ask, whole answers, formats, speed."""

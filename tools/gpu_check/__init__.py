"""The checks that only a GPU can make, as one report that anyone can recompute; see bench/README.md.

``points`` says what is asked, how a value follows from raw samples and where the bar is; ``sections`` lists what is
measured; ``report`` runs it, each section in its own process, and joins what they recorded; ``validate`` recomputes.
"""

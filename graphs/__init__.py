if __name__ != "dsv4.graphs":
    raise ImportError(f"import this package as dsv4.graphs, not as {__name__}")

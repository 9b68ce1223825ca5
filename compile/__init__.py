if __name__ != "dsv4.compile":
    raise ImportError(f"import this package as dsv4.compile, not as {__name__}")

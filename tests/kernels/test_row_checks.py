"""CUDA dispatches refuse the rows that the references refuse, before any kernel reads past the end of a tensor."""

import pytest

from dsv4 import ops

from ..ops import row_arguments


@pytest.mark.parametrize(("name", "argument"), row_arguments.CASES)
def test_fewer_rows(name, argument):
    values, kwargs, message = row_arguments.cut(name, argument, "one")
    with pytest.raises(ValueError, match=message):
        ops.specs()[name].cuda(*values.values(), **kwargs)

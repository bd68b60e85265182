"""The models of `python -m tests.torch.layouts`; one of them, in small, is saved and restored in `test_dcp_ranks`."""

from __future__ import annotations

import pytest

from tests.torch.layouts import MODELS


def test_models_have_as_many_parameters_as_those_of_the_benchmark() -> None:
    for name, parameters in (("8b", 8.030e9), ("70b", 6.988e10), ("405b", 4.0585e11), ("1t", 1.183e12)):
        assert MODELS[name].bytes / 14 == pytest.approx(parameters, rel=1e-3), name

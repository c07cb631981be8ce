"""Every encoding and variant against the half of the battery that is about an encoding alone."""

import jax
import numpy as np
import pytest
from every_instance import INSTANCES, every_instance

from pe_ablation import conformance

pytestmark = pytest.mark.usefixtures("quick_compilation", "rolled_layers")


@every_instance
def test_the_promises_of_an_encoding_are_kept(instance):
    """And what is compared is there: no gradient is all zeros."""
    subject = conformance.Subject(*INSTANCES[instance])
    assert [str(each) for each in conformance.results(subject, conformance.ALONE) if not each.ok] == []
    _, (parameters, (*vectors, _)) = subject.padded[conformance.LAST]
    assert min(np.abs(each).max() for each in jax.tree.leaves((parameters, vectors))) > 1e-3

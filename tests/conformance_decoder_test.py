"""Every encoding and variant against the half of the battery that is about a decoder with it."""

import pytest
from every_instance import INSTANCES, every_instance

from pe_ablation import conformance

pytestmark = pytest.mark.usefixtures("quick_compilation", "rolled_layers")


@every_instance
def test_the_promises_of_a_decoder_are_kept(instance):
    subject = conformance.Subject(*INSTANCES[instance])
    assert [str(each) for each in conformance.results(subject, conformance.IN_A_DECODER) if not each.ok] == []

"""Every encoding and every variant that the battery is run on."""

import pytest

from pe_ablation import encodings

INSTANCES = encodings.instances()
IDS = [name + "".join(f"-{key}={value}" for key, value in options.items()) for name, options in INSTANCES]
every_instance = pytest.mark.parametrize("instance", range(len(INSTANCES)), ids=IDS)

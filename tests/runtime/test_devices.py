"""Devices for a mesh that several processes share."""

import pytest

from lingvo_gshard.runtime import devices


def test_devices_that_processes_cannot_share_evenly_are_refused():
    # With one device in each process, two processes would wait for each other forever.
    with pytest.raises(ValueError, match=r"^`mesh` needs 3 devices, which 2 processes cannot"):
        devices.devices_for(3, processes=2)

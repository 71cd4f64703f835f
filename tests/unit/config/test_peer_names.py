"""Names of other projects: each one stands for a setting that exists."""

from __future__ import annotations

from quartet.config.loading import section_of
from quartet.config.peer_names import KEYS_BY_PEER_NAME
from quartet.config.root import Config


def test_every_peer_name_names_a_setting() -> None:
    for key in KEYS_BY_PEER_NAME.values():
        section: type = Config
        *path, last = key.split(".")
        for part in path:
            subsection = section_of(section.model_fields[part].annotation)
            assert subsection is not None, key
            section = subsection
        assert last in section.model_fields, key

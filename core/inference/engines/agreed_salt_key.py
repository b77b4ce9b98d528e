"""The salt key that all ranks of a model use."""

import os

import torch

from ...parallel_groups import ParallelGroups
from ..contexts.cache.hashing import SaltKey, drawn_key, given_key


def agreed_salt_key(
    setting: bytes | str | None, groups: ParallelGroups, device: torch.device | None = None
) -> SaltKey:
    """The key of the configuration, else of the environment, else a drawn one, the same on every rank.

    Where the model is split, this is a collective. A drawn key goes from the first rank to the others over
    the groups, as it is.

    Args:
        setting: `InferenceConfig.salt_key`.
        groups: the ranks of the model.
        device: the device from which nccl sends.

    Raises:
        ValueError: the ranks have different keys, or one has none that is accepted; on all ranks.
    """
    if not groups.is_split:
        key = given_key(setting, os.environ)
        return SaltKey(drawn_key() if key is None else key)
    key, failure = None, ""
    try:
        key = given_key(setting, os.environ)
    except ValueError as error:
        failure = str(error)
    told = groups.gather((failure, None if key is None else SaltKey(key).key_id), device)
    failures = [failure for failure, _ in told if failure]
    if failures:
        raise ValueError(failures[0])
    key_ids = [key_id for _, key_id in told]
    if len(set(key_ids)) > 1:
        raise ValueError(
            f"salt_key has the key ids {key_ids} on the model's ranks; accepted: one key on all ranks, or "
            "none on any"
        )
    return SaltKey(groups.gather(drawn_key(), device)[0] if key is None else key)

"""The only place that contacts the model hub: to get the config.json of a hub id."""

from __future__ import annotations

from pathlib import Path

from autofit.catalog import architecture_file
from autofit.core.errors import EnvironmentLacks, UsageError, lines_of


def config_text(hub_id: str) -> str:
    """The text of the config.json of `hub_id` (`owner/name`); from the local cache if the hub cannot be reached.

    Raises `UsageError` if the hub has no such model or the model has no config.json; `EnvironmentLacks` if access to
    the model must be granted first, or if the hub cannot be reached and the cache has no copy.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        # The download would retry an unreachable hub for half a minute; this request is made only once.
        get_hf_file_metadata(hf_hub_url(hub_id, "config.json"), timeout=5.0)
        file = Path(hf_hub_download(hub_id, "config.json", etag_timeout=5.0))
    except errors.HFValidationError as error:
        raise UsageError(f"{hub_id!r} does not name a model: not in the catalog, not a path, not a hub id") from error
    except errors.GatedRepoError as error:
        raise EnvironmentLacks(
            f"the hub gives access to {hub_id} only to users who have accepted its licence",
            remedy="accept it on the model's page and run `hf auth login`, or give a folder with its config.json",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(f"the hub has no model {hub_id!r}, or it is private") from error
    except errors.RemoteEntryNotFoundError as error:
        raise UsageError(f"{hub_id} has no config.json on the hub") from error
    except Exception as error:
        # Transport exceptions depend on the HTTP library that this version of the hub's client uses.
        cached = try_to_load_from_cache(hub_id, "config.json")
        if not isinstance(cached, str):
            raise EnvironmentLacks(
                f"the hub cannot be reached for the config.json of {hub_id}: {' '.join(lines_of(error))}",
                remedy="connect to the internet, or give a catalog name (`autofit models`) or a folder with a "
                "config.json",
            ) from error
        file = Path(cached)
    return architecture_file.read(file)

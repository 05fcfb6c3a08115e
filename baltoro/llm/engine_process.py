"""The entry of an engine's own process: it introduces the engine, which speaks ids, to the stop rules of `chat`.

In: a model folder, an EngineConfig, an address to answer on. Out: an exit code; messages go over the address.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from baltoro.chat.factories import Factories
from baltoro.chat.tokenizer import VOCAB_FILE, Tokenizer
from baltoro.errors import UserError

if TYPE_CHECKING:
    from baltoro.engine.config import EngineConfig
    from baltoro.engine.publish import PublishOptions


def engine_main(model_dir: str, config: EngineConfig, address: str, publish: PublishOptions) -> None:
    """An engine for one program that drives it with ids; it ends with that program, and the folder of `publish.path`
    with both. A model folder without a tokenizer has no stop strings and no grammars."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from baltoro.engine.worker import end_with_parent, run_worker

    end_with_parent(Path(publish.path).parent)
    made = Factories(Tokenizer.load(model_dir)) if (Path(model_dir) / VOCAB_FILE).is_file() else None
    try:
        run_worker(
            model_dir,
            config,
            address,
            eos_ids=None if made is None else made.eos_ids,
            stop_rules=None if made is None else made.stop_rule,
            masks=None if made is None else made.mask,
            publish=publish,
        )
    except UserError:
        sys.exit(1)  # the other end was told why and says so

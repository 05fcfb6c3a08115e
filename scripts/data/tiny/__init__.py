"""The data of the tiny model: prose, code and dialogues from packages and from our own generators.

    python -m scripts.data.tiny --out data/tiny [--small]

One module a family. `exchange.py` has the words they share, `render.py` turns dialogues into ids, `build.py` runs the
families in processes and writes the corpora, `evalset.py` the held-out questions, `carry.py` one small file to move.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the neighbours import each other by bare names

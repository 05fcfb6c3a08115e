# Sourced by the other scripts: where things are, wheels, data, Triton's cache. Run from the root of the repository.
#
# $OUT      what comes back (a few files, each under 16 MB); default runs/out
# $CARRY    what the last call brought back and this one may use; default .carry (ignored by git)
# $DATA     data folder; unpacked from $DATA.carry if it is not there
# $PYTHON   interpreter; default python3
out="${OUT:-runs/out}"
carry="${CARRY:-.carry}"
data="${DATA:-data/tiny}"
python="${PYTHON:-python3}"
mkdir -p "$out"
export PYTHONUNBUFFERED=1
# one fixed path: Triton writes absolute paths into its cache
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton}"

if [ -d .whl ] && [ -z "${NO_WHEELS:-}" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site \
    .whl/fla_core*.whl .whl/flash*.whl .whl/msgspec*.whl
  export PYTHONPATH="/tmp/site:."
else
  export PYTHONPATH="."
fi

[ -f "$carry/triton.tar.xz" ] && "$python" scripts/gpu/tuning.py unpack "$carry/triton.tar.xz" "$TRITON_CACHE_DIR"

unpack_data() {
  [ -f "$data/manifest.json" ] || "$python" -m scripts.data.tiny.carry unpack "$data.carry" "$data"
}

pack_tuning() {
  [ ! -d "$TRITON_CACHE_DIR" ] || "$python" scripts/gpu/tuning.py pack "$TRITON_CACHE_DIR" "$out/triton.tar.xz"
}

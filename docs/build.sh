#!/usr/bin/env bash
# Builds the documentation's site into docs/_build/html, or into the folder that is named. Every warning is an error. All of
# it is built each time: of pages that it doesn't read anew Sphinx forgets the words that the search has for them.
#
#     docs/build.sh [FOLDER]
#
# Needs what `pip install "ms_kungfu[docs]"` brings, and ms_kungfu built for this Python; MindSpore where it is there.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
site=$(realpath -m -- "${1:-$here/_build/html}")
exec python -m sphinx --builder html --fail-on-warning --keep-going --quiet --fresh-env --write-all \
  --doctree-dir "$(dirname -- "$site")/doctrees" "$here" "$site"

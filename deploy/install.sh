#!/usr/bin/env bash
# Installs this checkout, editable, into .venv, with extras where they are named: `deploy/install.sh dev`.
#
# By uv, which unpacks on all cores and is told of the indexes that pip is configured with; by pip where that fails.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-}
python=.venv/bin/python
pip=("$python" -m pip --quiet --disable-pip-version-check)

by_uv() {
    "${pip[@]}" install --constraint constraints.txt uv || return
    while IFS='=' read -r key value; do
        value=${value:1:-1} value=${value//\\n/ }
        case ${key##*.} in
            index-url) export UV_DEFAULT_INDEX=$value ;;
            extra-index-url) export UV_INDEX=$value ;;
            find-links) export UV_FIND_LINKS=${value// /,} ;;
            cert) export SSL_CERT_FILE=$value ;;
            no-index) return 1 ;;
        esac
    done < <("$python" -m pip config list)
    # The best version of all indexes, for one that pip is given may have other versions than the first; a file whose hash
    # is another than PyPI's is refused.
    local install=(.venv/bin/uv pip install --quiet --python "$python" --index-strategy unsafe-best-match)
    local said
    if ! said=$("${install[@]}" --constraint constraints.txt --constraint deploy/hashes.txt \
        --constraint deploy/hashes_extras.txt ${extras:+--extra "$extras"} --requirements pyproject.toml 2>&1); then
        echo "$said" >&2
        [[ $said != *"Hash mismatch"* ]] || exit 1  # pip would take the file
        return 1
    fi
    "${install[@]}" --no-deps --editable . &  # the kernels in C, on one core
    compile
    wait $!
}

by_pip() {
    "${pip[@]}" install --upgrade 'pip>=25'  # resolves in half the time
    "${pip[@]}" install --no-compile --constraint constraints.txt --editable ".${extras:+[$extras]}"
    compile
}

# On all cores, where pip would on one, and without a third of all source, which few processes import, or none;
# some packages carry files that are not for this Python.
compile() {
    local folders='tests?|_internal|_inductor|transformers/models|ray/(rllib|data|tune|train|llm)|openai/(types|resources)'
    local packages='torchgen|pip|mypyc?|setuptools|networkx|pygments'
    "$python" -m compileall -q -j 0 -x "/($folders|$packages)/" .venv/lib > /dev/null || true
}

by_uv || by_pip

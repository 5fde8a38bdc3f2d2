#!/bin/bash
# Run other projects' clients, test suites and load generators against a served chat model; docs/requests.md has
# what came of it. Usage: run.sh [TOOL...]; OUTRIDER_URL and OUTRIDER_MODEL name the server.
set -u
url=${OUTRIDER_URL:-http://127.0.0.1:8000}
model=${OUTRIDER_MODEL:-smollm2-135m-instruct}
here=$(cd "$(dirname "$0")" && pwd)
cache=$here/../../../.cache/compat
mkdir -p "$cache" && cache=$(cd "$cache" && pwd) && cd "$cache" || exit 1
export LITELLM_LOCAL_MODEL_COST_MAP=True
export OPENAI_BASE_URL=$url/v1 OPENAI_API_KEY=none OUTRIDER_MODEL=$model OUTRIDER_URL=$url
failed=()

environment() {  # NAME PACKAGE...: a virtual environment with these packages
    local name=$1
    shift
    if ! [ -f "$name/.installed" ] || [ "$(cat "$name/.installed")" != "$*" ]; then
        python3 -m venv "$name" && "$name/bin/pip" install --quiet --disable-pip-version-check "$@" || return 1
        echo "$*" > "$name/.installed"
    fi
}

langchain() {
    environment langchain langchain-openai==1.7.3 langchain-tests==1.1.9 pytest==9.2.0 pytest-asyncio==1.5.0 &&
        langchain/bin/python -m pytest -q -p no:cacheprovider --noconftest --rootdir="$here" -c /dev/null -o asyncio_mode=auto \
            -o asyncio_default_fixture_loop_scope=session -o asyncio_default_test_loop_scope=session "$here/langchain_checks.py"
}
llamaindex() {
    environment llamaindex llama-index-llms-openai-like==0.8.1 && llamaindex/bin/python "$here/llamaindex_checks.py"
}
litellm() {
    environment litellm litellm==1.106.2 mcp==2.3.0 && litellm/bin/python "$here/litellm_checks.py"
}
pydanticai() {
    environment pydanticai 'pydantic-ai-slim[openai,anthropic]==2.68.0' &&
        pydanticai/bin/python "$here/pydantic_ai_checks.py"
}
schemathesis() {  # our document and OpenAI's; MODE=all sends bodies that break it too
    environment schemathesis schemathesis==4.32.5 openai==3.52.0 &&
        schemathesis/bin/python "$here/openai_document.py" > openai.json &&
        requests_of openai.json --phases coverage,fuzzing --continue-on-failure &&
        requests_of "$url/openapi.json" --phases examples,fuzzing --exclude-path-regex '^/admin/'
}
requests_of() {  # DOCUMENT OPTION...
    schemathesis/bin/schemathesis run "$@" --url "$url" --mode "${MODE:-positive}" \
        --checks "${CHECKS:-not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance}" \
        --max-examples "${EXAMPLES:-20}" --max-time "${MAX_TIME:-600}" --seed 7 --request-timeout 120
}
aiperf() {
    environment aiperf aiperf==0.13.0 &&
        aiperf/bin/aiperf profile --model "$model" --url "$url" --endpoint-type chat --streaming \
            --tokenizer "${TOKENIZER:-$model}" --request-count 8 --concurrency 2 --output-tokens-mean 32 \
            --synthetic-input-tokens-mean 64 --output-artifact-dir aiperf-out --ui simple
}
lmeval() {
    local settings=model=$model,base_url=$url/v1/completions,tokenizer=${TOKENIZER:-$model},max_length=2000
    environment lmeval 'lm-eval[api]==0.4.13' transformers==5.23.0 && cd "$here/lm_eval" &&
        "$cache/lmeval/bin/lm-eval" run --model local-completions --tasks capitals,counting --include_path . \
            --model_args "$settings,tokenizer_backend=huggingface" --output_path "$cache/lmeval-out"
    local status=$?
    cd "$cache" && return "$status"
}
guidellm() {  # its torch is the project's: PyPI's would bring CUDA
    [ -d guidellm ] || python3 -m venv guidellm || return 1
    "$here/../../../.venv/bin/python" -c 'import torch; print(torch.__path__[0].rpartition("/")[0])' \
        > "$(echo guidellm/lib/python3*/site-packages)/torch_of_the_project.pth" || return 1
    environment guidellm guidellm==0.8.1 &&
        guidellm/bin/guidellm run --backend "kind=openai_http,target=$url,request_format=/v1/completions" \
            --profile kind=concurrent,streams=2 --constraint kind=max_requests,count=8 --disable-progress \
            --tokenizer "kind=huggingface_auto,model=${TOKENIZER:-$model}" --output kind=console \
            --output kind=json,path=guidellm.json --data kind=synthetic_text,prompt_tokens=64,output_tokens=32 &&
        grep -q draft_acceptance_rate guidellm.json
}
dynamo() {  # of a server with pair.kv_events; KV_EVENTS and BLOCK_TOKENS say where and how long its blocks are
    environment dynamo ai-dynamo-runtime==1.6.1 && dynamo/bin/python "$here/dynamo_checks.py"
}
agent() {  # COMMAND...: run it beside a server that plays a model which calls the agent's shell
    local root=$here/../../.. port=${AGENT_PORT:-8799} server status
    PYTHONPATH=$root "$root/.venv/bin/python" -m tests.serve.compat.agent_server "$port" &
    server=$!
    for _ in $(seq 60); do curl -sf "http://127.0.0.1:$port/live" > /dev/null && break; sleep 0.5; done
    mkdir -p agent-work && (cd agent-work && timeout 120 "$@" < /dev/null) | tee agent.out
    status=${PIPESTATUS[0]}
    kill "$server"
    ((status == 0)) && grep -q "The shell works" agent.out
}
codex() {
    npm install --silent --prefix npm @openai/codex@0.169.0 || return 1
    local provider="{name=\"outrider\", base_url=\"http://127.0.0.1:${AGENT_PORT:-8799}/v1\", wire_api=\"responses\"}"
    CODEX_HOME=$(mktemp -d) agent "$cache/npm/node_modules/.bin/codex" exec --skip-git-repo-check --sandbox read-only \
        -m fake -c model_provider=outrider -c "model_providers.outrider=$provider" "Say where you are."
}
claudecode() {
    npm install --silent --prefix npm @anthropic-ai/claude-code@2.1.197 || return 1
    HOME=$(mktemp -d) DISABLE_TELEMETRY=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 ANTHROPIC_API_KEY=none \
        ANTHROPIC_BASE_URL=http://127.0.0.1:${AGENT_PORT:-8799} \
        agent "$cache/npm/node_modules/.bin/claude" -p "Say where you are." --model fake --allowedTools "Bash(echo:*)"
}
vllmbench() {
    python3 "$here/vllm_bench_requests.py"
}

for tool in "${@:-langchain llamaindex litellm pydanticai schemathesis vllmbench aiperf lmeval guidellm
        codex claudecode}"; do
    for each in $tool; do
        echo "== $each"
        "$each" || failed+=("$each")
    done
done
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi

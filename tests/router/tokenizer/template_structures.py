"""Chat templates with the structures of published models, reduced to their demands on a chat."""

# ruff: noqa: E501 -- templates

from __future__ import annotations

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

_GEMMA_3 = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}"
    "{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- else -%}"
    "{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = '' -%}"
    "{%- set loop_messages = messages -%}{%- endif -%}{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}{%- set role = 'model' -%}{%- else -%}"
    "{%- set role = message['role'] -%}{%- endif -%}"
    "{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- elif message['content'] is iterable -%}"
    "{%- for item in message['content'] -%}{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}"
    "{%- endfor -%}{%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}{{ '<end_of_turn>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)

_LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}{% else %}"
    "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)

_MISTRAL_1 = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)

_MISTRAL_3 = (
    "{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}"
    "{% set ns = namespace(index=0) %}{% for message in loop_messages %}"
    "{% if not (message.role == 'tool' or (message.tool_calls is defined and message.tool_calls is not none)) %}"
    "{% if (message['role'] == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}{{ bos_token }}{% for message in loop_messages %}"
    "{% if message['role'] == 'user' %}{% if loop.first and system_message is defined %}"
    "{{ '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}{% else %}"
    "{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}"
    "{% elif message.tool_calls is defined and message.tool_calls is not none %}"
    "{% if message.content is defined and message.content is not none and message.content|length > 0 %}"
    "{{ ' ' + message.content }}{% endif %}{{ '[TOOL_CALLS] [' }}{% for call in message.tool_calls %}"
    "{{ (call.function | tojson)[:-1] }}{% if not call.id is defined or call.id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ ', \"id\": \"' + call.id + '\"}' }}{% endfor %}{{ ']' + eos_token }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}"
    "{% elif message['role'] == 'tool' %}{% if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ '[TOOL_RESULTS] {\"content\": ' + message.content|string + ', \"call_id\": \"' + message.tool_call_id + '\"}' }}"
    "{{ '[/TOOL_RESULTS]' }}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)

# Strict in Mistral's own way: nothing but an answer or another result may follow a result.
_MISTRAL_7 = (
    "{{ bos_token }}{% set ns = namespace(last='') %}{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}"
    "{% if message.role == 'user' and ns.last not in ('', 'system', 'assistant') %}"
    "{{ raise_exception('Unexpected role user after role ' + ns.last) }}{% endif %}"
    "{% if message.role == 'assistant' and ns.last not in ('user', 'tool') %}"
    "{{ raise_exception('Unexpected role assistant after role ' + ns.last) }}{% endif %}"
    "{% if message.role == 'tool' and ns.last not in ('calls', 'tool') %}"
    "{{ raise_exception('Unexpected role tool after role ' + ns.last) }}{% endif %}"
    "{% if message.role == 'assistant' and message.tool_calls %}{{ message.content or '' }}"
    "{% for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    "{% endfor %}{% set ns.last = 'calls' %}{% else %}{% if not message.content %}"
    "{{ raise_exception('empty ' + message.role) }}{% endif %}[{{ message.role }}]{{ message.content }}"
    "{% set ns.last = message.role %}{% endif %}{% endfor %}"
)

_PHI_3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}"
    "{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)

_DEEPSEEK_R1 = (
    "{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}"
    "{{ '<｜User｜>' + message['content'] }}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is none %}{%- set ns.is_tool = false -%}"
    "{%- for tool in message['tool_calls'] %}{%- if not ns.is_first %}"
    "{{ '<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' "
    "+ tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}"
    "{%- set ns.is_first = true -%}{%- else %}{{ '\n<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' "
    "+ tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}"
    "{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}{%- if ns.is_tool %}"
    "{{ '<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}{%- set ns.is_tool = false -%}"
    "{%- else %}{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endif %}"
    "{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{%- if ns.is_output_first %}"
    "{{ '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}"
    "{%- set ns.is_output_first = false %}{%- else %}"
    "{{ '\n<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}{%- endif %}"
    "{%- endfor -%}{% if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}"
    "{% if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜>' }}{% endif %}"
)

_COMMAND_R = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% if system_message != false %}"
    "{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}"
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set content = message['content'] %}{% if message['role'] == 'user' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)

_VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}{% else %}"
    "{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

_FALCON = (
    "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}{% if message['role'] == 'system' %}"
    "{{ 'System: ' + message['content'] }}{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Falcon: ' + message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\nFalcon:' }}{% endif %}"
)

_NEMOTRON = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}<extra_id_0>System\n{{ system }}\n"
    "{% if tools %}{% for tool in tools %}<tool>{{ tool | tojson }}</tool>{% endfor %}{% endif %}"
    "{% for message in rest %}{% if message['role'] == 'user' %}<extra_id_1>User\n{{ message['content'] | trim }}\n"
    "{% elif message['role'] == 'assistant' %}<extra_id_1>Assistant\n{{ message['content'] | trim }}\n"
    "{% if message.tool_calls %}<TOOLCALL>[{% for call in message.tool_calls %}"
    "{{ '{\"name\": \"' + call.function.name + '\", \"arguments\": ' + call.function.arguments + '}' }}"
    "{% endfor %}]</TOOLCALL>{% endif %}{% elif message['role'] == 'tool' %}<extra_id_1>Tool\n{{ message['content'] }}\n"
    "{% else %}{{ raise_exception('Unexpected role ' + message['role']) }}{% endif %}{% endfor %}"
)

_EXAONE_4 = (
    "{% for i in range(messages | length) %}{% set msg = messages[i] %}{% set role = msg.role %}"
    "{% if role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('Unknown role ' + role) }}{% endif %}"
    "{% if loop.first %}{% if role == 'system' %}[|system|]\n{{ msg.content | trim }}[|endofturn|]\n{% endif %}"
    "{% endif %}{% if role == 'assistant' %}[|assistant|]\n{% if msg.content %}{{ msg.content | trim }}{% endif %}"
    "{% if msg.tool_calls %}{% for call in msg.tool_calls %}{% if call.function is defined %}"
    "{% set call = call.function %}{% endif %}{% set arguments = call.arguments or call.parameters %}"
    "{% if call.arguments is not mapping %}{{ raise_exception('arguments must be a mapping') }}{% endif %}"
    '<tool_call>{"name": "{{ call.name }}", "arguments": {{ arguments | tojson }}}</tool_call>{% endfor %}{% endif %}'
    "[|endofturn|]\n{% elif role == 'tool' %}{% if not loop.first and messages[i - 1].role in ['assistant', 'tool'] %}"
    "[|tool|]\n<tool_result>{{ msg.content }}</tool_result>{% else %}"
    "{{ raise_exception('a tool message needs a call before it') }}{% endif %}{% elif role == 'user' %}"
    "[|user|]\n{{ msg.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}[|assistant|]\n{% endif %}"
)

_PARTS = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<end>{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)

_NAMED_RESULTS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% if not m.name %}{{ raise_exception('a result needs a name') }}"
    "{% endif %}<{{ m.name }}>{{ m.content }}{% elif m.role == 'assistant' and m.tool_calls %}{{ m.content or '' }}"
    "{% for c in m.tool_calls %}[{{ c.id }}:{{ c.function.name }}:{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)

# Results for every call, directly after it, one system message, and an answer that is a user's turn to ask for.
_PEDANT = (
    "{% set ns = namespace(open=0) %}{% for m in messages %}"
    "{% if m.role == 'system' and loop.index0 > 0 %}{{ raise_exception('one system message, first') }}{% endif %}"
    "{% if m.role == 'tool' %}{% if ns.open == 0 %}{{ raise_exception('no call is open') }}{% endif %}"
    "{% set ns.open = ns.open - 1 %}{% elif ns.open > 0 %}{{ raise_exception('a call has no result') }}{% endif %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{% set ns.open = m.tool_calls | length %}"
    "{% for c in m.tool_calls %}{% if not c.id.startswith('call_') %}{{ raise_exception('ids begin with call_') }}{% endif %}"
    "[{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}]{% endfor %}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('the last turn is a user or a tool') }}{% endif %}"
)

_DEFINED_TOOLS = (
    "{% if tools is defined %}{% for tool in tools %}{{ tool.function.name + tool.function.description }}{% endfor %}"
    "{% endif %}" + _CHATML
)

_GRANITE_4 = (
    "{% if messages[0].role == 'system' %}<sys>{{ messages[0].content }}{% if tools %}{{ tools | tojson }}{% endif %}</sys>"
    "{% elif tools %}<sys>{{ tools | tojson }}</sys>{% endif %}{% for message in messages %}"
    "{% if message.role == 'user' or (message.role == 'system' and not loop.first) %}<{{ message.role }}>"
    "{{ message.content }}</>{% elif message.role == 'assistant' %}<assistant>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}</tool_call>"
    "{% endfor %}</>{% elif message.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<user>"
    "{% endif %}<tool_response>{{ message.content }}</tool_response>{% endif %}{% endfor %}"
)

_OLMO_3 = (
    "{% set has_system = messages | selectattr('role', 'equalto', 'system') | list | length > 0 %}"
    "{% if not has_system %}<|im_start|>system\nYou are Olmo.{% if tools %}<functions>{{ tools | tojson }}</functions>"
    "{% endif %}<|im_end|>\n{% endif %}{% for message in messages %}{% if message['role'] == 'system' %}"
    "<|im_start|>system\n{{ message['content'] }}{% if tools %}<functions>{{ tools | tojson }}</functions>{% endif %}"
    "<|im_end|>\n{% elif message['role'] == 'user' %}<|im_start|>user\n{{ message['content'] }}<|im_end|>\n"
    "{% elif message['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% if message.get('content', none) is not none %}{{ message['content'] }}{% endif %}"
    "{% if message.get('tool_calls', none) is not none %}<function_calls>{% for call in message['tool_calls'] %}"
    "{{ call['function']['name'] }}({% for name, value in call['function']['arguments'].items() %}"
    "{{ name }}={{ value | tojson }}{% endfor %}){% endfor %}</function_calls>{% endif %}<|im_end|>\n"
    "{% elif message['role'] == 'environment' or message['role'] == 'tool' %}<|im_start|>environment\n"
    "{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
)

# Command R7B: the results of a turn are shown together, unless the first one's id was in an earlier turn.
_COMMAND_R7B = (
    "{% set ns = namespace(seen=[]) %}{% for message in messages %}"
    "{% if message.role == 'tool' and message.tool_call_id not in ns.seen %}<results>{{ message.content }}"
    "{% for later in messages[loop.index0 + 1:] %}{% if later.role == 'tool' %}<and>{{ later.content }}"
    "{% set ns.seen = ns.seen + [later.tool_call_id] %}{% else %}{% break %}{% endif %}{% endfor %}</results>"
    "{% elif message.role == 'assistant' and message.tool_calls %}<actions>{% for call in message.tool_calls %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}</actions>"
    "{% elif message.role != 'tool' %}<{{ message.role }}>{{ message.content }}{% endif %}{% endfor %}"
)

# Kimi K2 as of its second version: a call is shown by its id, and a result's role by its name.
_KIMI_K2_IDS = (
    "{% for message in messages %}{% set name = message.get('name') or message['role'] %}<|{{ name }}|>"
    "{% if message['role'] == 'assistant' and message.get('tool_calls') %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] %}<|call|>{{ call['id'] }}<|args|>"
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}{% else %}"
    "{{ call['function']['arguments'] | tojson }}{% endif %}{% endfor %}{% elif message['role'] == 'tool' %}"
    "## Return of {{ message.tool_call_id }}\n{{ message['content'] }}{% else %}{{ message['content'] or '' }}{% endif %}"
    "<|im_end|>{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)

STRUCTURES: dict[str, str] = {
    "chatml": _CHATML,
    "gemma_2": _GEMMA_2,
    "gemma_3": _GEMMA_3,
    "llama_2": _LLAMA_2,
    "mistral_1": _MISTRAL_1,
    "mistral_3": _MISTRAL_3,
    "mistral_7": _MISTRAL_7,
    "phi_3": _PHI_3,
    "zephyr": _PHI_3.replace("<|end|>", "</s>"),
    "deepseek_r1": _DEEPSEEK_R1,
    "command_r": _COMMAND_R,
    "vicuna": _VICUNA,
    "falcon": _FALCON,
    "nemotron": _NEMOTRON,
    "exaone_4": _EXAONE_4,
    "content_in_parts": _PARTS,
    "named_results": _NAMED_RESULTS,
    "pedant": _PEDANT,
    "defined_tools": _DEFINED_TOOLS,
    "granite_4": _GRANITE_4,
    "olmo_3": _OLMO_3,
    "kimi_k2_ids": _KIMI_K2_IDS,
    "command_r7b": _COMMAND_R7B,
}

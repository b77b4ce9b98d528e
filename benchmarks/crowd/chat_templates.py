"""Chat templates for `chat_marks.py`: what real ones do to a conversation, in a few lines each.

Each name says what the template does. `special_tokens` finds the names of special tokens in any template.
"""

import re

_MARKERS = re.compile(
    r"<\|[\w ]+\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|\[/?[A-Z_]{3,}\]|</?s>|<bos>"
    r"|<(?:start|end)_of_turn>|</?think>"
)

CHATML = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages if message.role == 'user' %}
    {%- set ns.last = messages.index(message) %}
{%- endfor %}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {%- for tool in tools or [] %}{{ tool | tojson + '\\n' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = (message.content or '').split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

EMPTY_THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages if message.role == 'user' %}
    {%- set ns.last = messages.index(message) %}
{%- endfor %}
{%- for tool in tools or [] %}{{ tool | tojson + '\\n' }}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}
        {%- else %}{{ '<think></think>' }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}
"""

LLAMA = """\
{{- '<|begin|><|header|>system<|end_header|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot|>' }}
{%- for message in messages %}
    {{- '<|header|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header|>\\n\\n' }}
    {%- if loop.first %}
        {%- if message.role != 'user' %}{{ raise_exception('no first user message') }}{% endif %}
        {%- for tool in tools or [] %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
        {{- message.tool_calls[0].function | tojson }}
    {%- else %}{{ message.content | trim }}{% endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\\n\\n' }}{% endif %}
"""

MISTRAL = """\
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- set messages = messages[1:] if system is not none else messages %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(turn=0) %}
{%- for message in messages %}
    {%- if message.role in ('user', 'assistant') and not message.tool_calls %}
        {%- if (message.role == 'user') != (ns.turn % 2 == 0) %}
            {{- raise_exception('roles must alternate') }}
        {%- endif %}
        {%- set ns.turn = ns.turn + 1 %}
    {%- endif %}
{%- endfor %}
{{- '<s>' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if message == users[-1] and tools %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' }}
        {%- if message == users[-1] and system is not none %}{{ system + '\\n\\n' }}{% endif %}
        {{- message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS]' + message.tool_calls | map(attribute='function') | list | tojson + '</s>' }}
    {%- elif message.role == 'assistant' %}{{ ' ' + message.content + '</s>' }}
    {%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('no role ' + message.role) }}{% endif %}
{%- endfor %}
"""

GEMMA = """\
{{- '<bos>' }}
{%- set first = '' %}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
    {%- if loop.first %}{{ first }}{% endif %}
    {%- if message.content is string %}{{ message.content | trim }}
    {%- else %}{% for part in message.content %}{{ part.text | trim }}{% endfor %}{% endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

VICUNA = """\
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ message.content + '\\n\\n' }}
    {%- elif message.role == 'user' %}{{ 'USER: ' + message.content + '\\n' }}
    {%- elif message.role == 'assistant' %}{{ 'ASSISTANT: ' + message.content + '</s>\\n' }}
    {%- else %}{{ raise_exception('no role ' + message.role) }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
"""

TEMPLATES = {
    "ChatML, earlier thinking dropped": CHATML,
    "tools first, earlier thinking empty": EMPTY_THINKING,
    "Llama, date first, tools in first turn": LLAMA,
    "Mistral, system and tools in last turn": MISTRAL,
    "Gemma, no system role, roles alternate": GEMMA,
    "Vicuna, turns without special tokens": VICUNA,
}


def special_tokens(template: str) -> dict[str, int]:
    """Name to id, from 256 on, of what looks like special tokens in a template."""
    names = sorted({"<s>", "</s>", *_MARKERS.findall(template)})
    return {name: 256 + i for i, name in enumerate(names)}

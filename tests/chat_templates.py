"""Templates in the manner of well-known models, written for the tests, and conversations for them."""

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA_3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "You have these tools:\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today: " ~ date_string ~ "\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- raise_exception("No tools!") }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("Roles must alternate: user, assistant, user, ...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {%- generation %}
        {{- " " + message["content"]|trim + eos_token}}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}
{% for message in messages %}
    {%- if message['role'] == 'assistant' -%}
        {%- set role = 'model' -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}
    {%- if loop.index0 > 40 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{'<start_of_turn>model
'}}
{% endif %}
"""

MACROS = """{%- macro say(role, text='') -%}
    <{{ role }}>{{ text | replace('<', '&lt;') | upper if role == 'user' else text }}</{{ role }}>
{%- endmacro -%}
{% for message in messages | selectattr('role', 'in', ['user', 'assistant']) %}
{% set parts = message.content.split() %}
{{ loop.index }}/{{ loop.length }}
{{ say(message.role, parts | join(' ')) }} {{ parts|length }} {{ '%03d' % loop.index }}
{% endfor %}
{%- macro wrap(x) %}[{{ caller(x) }}]{% endmacro %}{% call(y) wrap('b') %}{{ y }}{% endcall %}
{% filter upper %}{{ messages | map(attribute='role') | unique | list }}{% endfilter %}
{{ {'tools': tools, 'é': [1, 2.5, none, true]} | tojson }} {{ "a{}b{}".format(1, 'x') }} {{ 'ab' * 3 }} {{ [1] + [2] }}
"""

FORMS = {"chatml": CHATML, "llama 3": LLAMA_3, "mistral": MISTRAL, "gemma": GEMMA, "macros": MACROS}

HELLO = [{"role": "user", "content": "  Hello! <b>é</b> 你好 \n"}]
LONGER = [
    *HELLO,
    {"role": "assistant", "content": " Hi.\n"},
    {"role": "user", "content": "{{ 7 * 7 }} {% raw %} 'quoted' \"twice\" <|im_end|>"},
]
CONVERSATIONS = {
    "one": HELLO,
    "longer": LONGER,
    "system": [{"role": "system", "content": "You are\n a poet. "}, *LONGER],
    "wrong order": LONGER[1:],
    "empty text": [{"role": "user", "content": ""}],
}

"""JSON schemas of many kinds for tests of guided decoding, and schemas that llguidance does not support."""


def an_object(required=None, **properties):
    """Return the schema of an object with only these properties, all of them required by default."""
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def an_array(items, least=0, most=3):
    """Return the schema of an array of `least` to `most` items."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def a_string(pattern=None, **more):
    """Return the schema of a string, with a pattern for the whole of it if one is given."""
    return {"type": "string", **more} | ({} if pattern is None else {"pattern": f"^{pattern}$"})


STRING, BOOLEAN, NULL = {"type": "string", "maxLength": 8}, {"type": "boolean"}, {"type": "null"}
INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
TREE = an_object(["v"], v=DIGIT, left={"$ref": "#/$defs/tree"}, right={"$ref": "#/$defs/tree"})
POINT = an_object(x=DIGIT, y=DIGIT)
CAT = an_object(kind={"const": "cat"}, lives=DIGIT)
DOG = an_object(kind={"const": "dog"}, barks=BOOLEAN)

TYPES = [
    *(BOOLEAN, NULL, INTEGER, NUMBER, STRING, {"type": ["boolean", "null"]}, {"type": ["integer", "boolean"]}),
    {"type": ["string", "null"], "maxLength": 4},
    {"type": ["number", "string", "null"], "maxLength": 3, "minimum": 0, "maximum": 1},
    {"type": ["array", "boolean"], "items": BOOLEAN, "maxItems": 2},
    {"type": ["object", "null"], "properties": {"a": DIGIT}, "required": ["a"], "additionalProperties": False},
    {"title": "flag", "description": "on or off", "default": False, "examples": [True], "type": "boolean"},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "null"},
    {"$comment": "a comment", "deprecated": True, "readOnly": True, "type": "boolean"},
]
INTEGERS = [
    {"type": "integer", **bounds}
    for bounds in (
        {"minimum": 0, "maximum": 0},
        {"minimum": 0, "maximum": 1},
        {"minimum": -1, "maximum": 1},
        {"minimum": -9, "maximum": -3},
        {"minimum": -120, "maximum": 35},
        {"minimum": 1, "maximum": 12},
        {"minimum": 7, "maximum": 1000},
        {"minimum": 99, "maximum": 101},
        {"minimum": 1900, "maximum": 2100},
        {"minimum": 123456, "maximum": 654321},
        {"minimum": 10**9, "maximum": 10**12},
        {"minimum": 5},
        {"maximum": 5},
        {"minimum": -5},
        {"exclusiveMinimum": 10, "maximum": 99},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 2},
        {"minimum": -10, "exclusiveMaximum": -8},
        {"minimum": 0.5, "maximum": 9.5},
        {"multipleOf": 2, "minimum": 0, "maximum": 20},
        {"multipleOf": 5, "minimum": 0, "maximum": 100},
        {"multipleOf": 7, "minimum": 1, "maximum": 60},
        {"multipleOf": 25, "minimum": -50, "maximum": 50},
        {"multipleOf": 1, "minimum": 3, "maximum": 4},
    )
]
NUMBERS = [
    {"type": "number", **bounds}
    for bounds in (
        {"minimum": 0, "maximum": 1},
        {"minimum": 0.5, "maximum": 2},
        {"minimum": -1.5, "maximum": 1.5},
        {"minimum": -3.25, "maximum": -0.75},
        {"minimum": 0.001, "maximum": 0.002},
        {"minimum": 99.9, "maximum": 100.1},
        {"minimum": -273.15},
        {"maximum": 0},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"exclusiveMinimum": -0.5, "maximum": 0.5},
        {"minimum": 2, "exclusiveMaximum": 3},
        {"minimum": 1, "maximum": 1},
        {"minimum": 0, "maximum": 100, "multipleOf": 0.5},
    )
]
STRINGS = [
    *(a_string(maxLength=n) for n in (0, 1, 3)),
    *(a_string(minLength=low, maxLength=high) for low, high in ((1, 1), (2, 2), (3, 5), (8, 12), (0, 20))),
    a_string("[A-Z][a-z]{2,6}"),
    a_string("[0-9]{3}-[0-9]{4}"),
    a_string(r"\d{1,3}(,\d{3})*"),
    a_string(r"\w+@\w+\.(com|org)"),
    a_string("(red|green|blue)( (light|dark))?"),
    a_string("#[0-9a-f]{6}"),
    a_string(r"[+-]?[0-9]+(\.[0-9]+)?"),
    a_string("a{2,4}b?c"),
    a_string("(ab|cd){1,3}"),
    a_string(r"v[0-9]+\.[0-9]+\.[0-9]+"),
    a_string("[äöü]{1,3}ß"),
    a_string("[A-Z]{2}[0-9]{2}"),
    a_string(r"\[[a-c]\]"),
    a_string("(?:x|y)z"),
    a_string("[^a-z]{2}"),
    a_string("a.c"),
    a_string("()"),
    {"type": "string", "pattern": "^ab", "maxLength": 5},
    {"type": "string", "pattern": "yz$", "maxLength": 5},
    {"type": "string", "pattern": "mid", "maxLength": 6},
    {"type": "string", "pattern": "^(one|two|three)$", "minLength": 4},
]
FORMATS = [
    a_string(format=name)
    for name in ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
]
VALUES = [
    *({"const": value} for value in (0, -5, 1.5, True, False, None, "", "text", [], {}, [1, [2]], {"a": {"b": None}})),
    {"const": {"a": [1, None]}},
    {"const": 'quote " and \\ and \n'},
    {"const": "日本 ü"},
    {"const": "\u0001\u007f"},
    {"const": 10**15},
    {"enum": ["red", "green", 7, None, False]},
    {"enum": ["a", "ab", "abc"]},
    {"enum": [1, 10, 100, 1000]},
    {"enum": [[1], [1, 2], {"x": 1}]},
    {"enum": ["only"]},
    {"enum": [True, False]},
    {"enum": ["", " ", "  "]},
    {"enum": [1, "1", 1.5]},
    {"type": "string", "enum": ["yes", "no"]},
    {"type": "integer", "enum": [2, 3, 5, 7]},
    {"enum": [f"value {i}" for i in range(50)]},
]
ARRAYS = [
    *(an_array(BOOLEAN, low, high) for low, high in ((0, 0), (0, 1), (1, 1), (2, 2), (2, 4), (5, 8))),
    an_array(DIGIT, 2, 4),
    an_array(STRING, 1, 2),
    an_array({"enum": ["p", "q"]}, 3, 3),
    an_array(an_array(BOOLEAN, 0, 2), 0, 2),
    an_array(an_array(an_array(NULL, 1, 1), 1, 1), 1, 1),
    an_array(POINT, 1, 2),
    an_array({"anyOf": [DIGIT, NULL]}, 1, 3),
    {"type": "array", "maxItems": 0},
    {"type": "array", "items": False},
    {"type": "array", "prefixItems": [BOOLEAN, DIGIT], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [BOOLEAN, DIGIT], "items": False},
    {"type": "array", "prefixItems": [DIGIT], "items": BOOLEAN, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"const": "add"}, DIGIT, DIGIT], "items": False, "minItems": 3, "maxItems": 3},
    {"type": "array", "prefixItems": [POINT, NULL], "minItems": 2, "maxItems": 2},
    {"type": "array", "items": True, "maxItems": 1, "prefixItems": [BOOLEAN]},
]
OBJECTS = [
    an_object(),
    an_object(a=BOOLEAN),
    an_object(name=STRING, age=DIGIT),
    an_object([], a=BOOLEAN, b=DIGIT),
    an_object(["b"], a=BOOLEAN, b=BOOLEAN, c=NULL),
    an_object(["c"], a=BOOLEAN, b=BOOLEAN, c=NULL),
    an_object(["a", "d"], a=DIGIT, b=DIGIT, c=DIGIT, d=DIGIT),
    an_object(point=POINT, label={"enum": ["p", "q"]}),
    an_object(first=STRING, second={"anyOf": [DIGIT, NULL]}),
    an_object(items=an_array(an_object(id=DIGIT, ok=BOOLEAN), 1, 2)),
    an_object(a=an_object(b=an_object(c=an_object(d=NULL)))),
    an_object(**{"two words": DIGIT, "ü": NULL, 'a"b': BOOLEAN, "": DIGIT, "$ref": DIGIT}),
    an_object(**{f"field_{i}": BOOLEAN for i in range(12)}),
    an_object([], **{f"f{i}": NULL for i in range(8)}),
    an_object(city=a_string("[A-Z][a-z]{2,6}"), zip=a_string("[0-9]{5}"), tags=an_array(STRING, 0, 2)),
    an_object(date=a_string(format="date"), id=a_string(format="uuid")),
    an_object(name=STRING, choice={"enum": ["A", "B", "C"]}, score={"type": "number", "minimum": 0, "maximum": 1}),
    {"type": "object", "additionalProperties": BOOLEAN, "maxProperties": 2},
    {"type": "object", "additionalProperties": DIGIT, "minProperties": 1, "maxProperties": 1},
    {"type": "object", "properties": {"a": DIGIT}, "required": ["a"], "additionalProperties": NULL, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^k[0-9]$": DIGIT}, "additionalProperties": False, "maxProperties": 2},
    {
        "type": "object",
        "patternProperties": {"^a": DIGIT, "^b": NULL},
        "additionalProperties": False,
        "maxProperties": 1,
    },
    {"type": "object", "properties": {"a": False, "b": DIGIT}, "required": ["b"], "additionalProperties": False},
    {"properties": {"a": DIGIT}, "required": ["a"], "type": "object", "additionalProperties": False, "title": "T"},
]
COMBINATIONS = [
    {"anyOf": [BOOLEAN, an_object(a=DIGIT)]},
    {"anyOf": [STRING, INTEGER]},
    {"anyOf": [CAT, DOG]},
    {"anyOf": [{"const": 'ü\n"\\'}, {"const": "日本"}]},
    {"anyOf": [DIGIT, {"minimum": 90, "maximum": 99, "type": "integer"}]},
    {"anyOf": [an_array(DIGIT, 1, 2), an_array(BOOLEAN, 1, 2)]},
    {"anyOf": [{"anyOf": [NULL, DIGIT]}, {"anyOf": [BOOLEAN]}]},
    {"type": "string", "anyOf": [{"maxLength": 2}, {"pattern": "^x{4}$"}]},
    {"anyOf": [an_object(a=DIGIT), an_object(a=BOOLEAN, b=NULL)]},
    {"oneOf": [NULL, {"type": "array", "items": DIGIT, "maxItems": 1}]},
    {"oneOf": [CAT, DOG]},
    {"oneOf": [DIGIT, a_string("[a-z]{2}")]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
    {"allOf": [{"type": "number"}, {"minimum": 0}, {"maximum": 1}]},
    {"allOf": [{"type": ["integer", "null"]}, {"type": ["null", "boolean"]}]},
    {"allOf": [{"type": "object", "properties": {"a": DIGIT}, "required": ["a"]}, an_object(a=INTEGER)]},
    {"allOf": [{"enum": [1, 2, 3, "x"]}, {"type": "integer"}]},
    {"allOf": [{"anyOf": [DIGIT, NULL]}, {"anyOf": [NULL, BOOLEAN]}]},
    {"allOf": [{"type": "array", "items": {"type": "integer", "minimum": 2}}, an_array(DIGIT, 1, 2)]},
    {"allOf": [{"type": "string", "pattern": "^[a-f]+$"}, {"pattern": "^[d-z]+$", "maxLength": 6}]},
    {"type": "integer", "allOf": [{"minimum": 0}], "anyOf": [{"maximum": 3}, {"minimum": 7, "maximum": 8}]},
    an_object(value={"anyOf": [an_object(a=DIGIT), an_array(DIGIT, 1, 1), NULL]}),
]
DEFS = {"d": DIGIT, "p": POINT, "s": a_string("[a-z]{1,3}"), "tree": TREE}
REFERENCES = [
    {"$defs": {"d": DIGIT}, "type": "array", "items": {"$ref": "#/$defs/d"}, "minItems": 1, "maxItems": 3},
    {"$defs": DEFS, "$ref": "#/$defs/d"},
    {"$defs": DEFS, "$ref": "#/$defs/tree"},
    {"definitions": {"d": DIGIT}, "$ref": "#/definitions/d"},
    {"$defs": DEFS, **an_object(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"})},
    {"$defs": DEFS, **an_array({"$ref": "#/$defs/p"}, 1, 2)},
    {"$defs": DEFS, "anyOf": [{"$ref": "#/$defs/d"}, {"$ref": "#/$defs/s"}]},
    {"$defs": DEFS, "allOf": [{"$ref": "#/$defs/d"}, {"minimum": 4}]},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": DIGIT}, "$ref": "#/$defs/a"},
    {"$defs": {"list": an_object(["head"], head=DIGIT, tail={"$ref": "#/$defs/list"})}, "$ref": "#/$defs/list"},
    {"$defs": {"nest": an_array({"$ref": "#/$defs/nest"}, 0, 1)}, "$ref": "#/$defs/nest"},
    {
        "$defs": {"e": {"anyOf": [DIGIT, an_object(op={"enum": ["+", "*"]}, l={"$ref": "#/$defs/e"}, r=DIGIT)]}},
        "$ref": "#/$defs/e",
    },
    {
        "$defs": {"a": an_object([], b={"$ref": "#/$defs/b"}), "b": an_object([], a={"$ref": "#/$defs/a"}, n=NULL)},
        "$ref": "#/$defs/a",
    },
    {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False},
    {"$defs": {"a/b": DIGIT, "c~d": NULL}, "anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c~0d"}]},
    {
        "properties": {"a": DIGIT, "b": {"$ref": "#/properties/a"}},
        "required": ["a", "b"],
        "type": "object",
        "additionalProperties": False,
    },
]
# As applications write them: answers, extracted records, plans, calls.
APPLICATIONS = [
    an_object(answer=STRING, confidence={"type": "number", "minimum": 0, "maximum": 1}),
    an_object(label={"enum": ["positive", "negative", "neutral"]}),
    an_object(name=STRING, email=a_string(r"[a-z]{1,6}@[a-z]{1,6}\.org"), age={"anyOf": [DIGIT, NULL]}),
    an_object(steps=an_array(an_object(n=DIGIT, text=STRING), 1, 2), done=BOOLEAN),
    an_object(tool={"enum": ["search", "open"]}, arguments=an_object(["query"], query=STRING, limit=DIGIT)),
    an_object(shape={"anyOf": [an_object(r=DIGIT), an_object(w=DIGIT, h=DIGIT)]}, color=a_string("#[0-9a-f]{3}")),
    an_object(start=a_string(format="date"), end={"anyOf": [a_string(format="date"), NULL]}),
    an_object(rows=an_array(an_array(DIGIT, 2, 2), 2, 2)),
    an_object(year={"type": "integer", "minimum": 1900, "maximum": 2100}, title=STRING, genres=an_array(STRING, 0, 1)),
    an_object(yes=BOOLEAN, why={"type": "string", "minLength": 1, "maxLength": 12}),
    an_object(matrix=an_array(an_array({"type": "number", "minimum": -1, "maximum": 1}, 1, 1), 1, 2)),
    an_object(user=an_object(id=a_string(format="uuid"), roles=an_array({"enum": ["admin", "guest"]}, 1, 2))),
]
SUPPORTED = [*TYPES, *INTEGERS, *NUMBERS, *STRINGS, *FORMATS, *VALUES, *ARRAYS, *OBJECTS, *COMBINATIONS, *REFERENCES]
SUPPORTED += APPLICATIONS

# With a part of the reason that the error message must have.
REFUSED = [
    *(
        ({"type": kind, **keyword}, next(iter(keyword)))
        for kind, keyword in (
            ("string", {"not": {"maxLength": 2}}),
            ("string", {"if": {"maxLength": 2}, "then": {"minLength": 2}}),
            ("array", {"uniqueItems": True}),
            ("array", {"contains": DIGIT}),
            ("array", {"minContains": 1}),
            ("array", {"unevaluatedItems": False}),
            ("object", {"dependentRequired": {"a": ["b"]}}),
            ("object", {"dependentSchemas": {"a": {}}}),
            ("object", {"propertyNames": {"maxLength": 3}}),
            ("object", {"unevaluatedProperties": False}),
        )
    ),
    ({"oneOf": [{"const": 1}, {"const": 2}]}, "oneOf constraints are not supported"),
    ({"oneOf": [INTEGER, NUMBER]}, "oneOf constraints are not supported"),
    ({"type": "object", "required": ["z"], "properties": {"a": DIGIT}, "maxProperties": 2}, "min/maxProperties only"),
    ({"type": "foo"}, "foo"),
    ({"type": 5}, "type must be a string or array"),
    ({"minimum": "x"}, "Expected f64 for 'minimum'"),
    ({"enum": 5}, "enum must be an array"),
    ({"type": "object", "required": 5}, "Expected array for 'required'"),
    ({"type": "array", "maxItems": -1}, "positive integer for 'maxItems'"),
    ({"type": "number", "multipleOf": 0}, "invalid multiple of"),
    (a_string("(a"), "regex parse error"),
    (a_string("(?=a)b"), "look-around"),
    (a_string(r"(a)\1"), "backreferences"),
    (a_string(format="json-pointer"), "Unknown format: json-pointer"),
    ({"$ref": "http://example.com/schema"}, "not present"),
    ({"$ref": "#/$defs/missing"}, "does not exist"),
    ({"$dynamicRef": "#x"}, "dynamicRef"),
    ({"enum": []}, "Unsatisfiable"),
    ({"allOf": [STRING, NULL]}, "Unsatisfiable.*incompatible types"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "Unsatisfiable.*minimum"),
    ({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 7}, "multiple of 7"),
    ({"type": "string", "minLength": 5, "maxLength": 4}, "Unsatisfiable.*minLength"),
    ({"type": "array", "minItems": 2, "maxItems": 1}, "Unsatisfiable.*minItems"),
    ({"enum": ["x" * 70_000]}, "more than 65,536"),
]

// Code as elements: comments, strings, numbers and keywords get a colour each, all else stays plain. The text itself is
// never changed. No pattern can go back over what it has read: the time is linear, and above MOST_CODE characters a
// block stays plain.
const MOST_CODE = 50000;
const HASH = "#[^\\n]*", SLASHES = "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)", DASHES = "--[^\\n]*";
const DOUBLE = '"(?:[^"\\\\\\n]|\\\\[^])*"?', SINGLE = "'(?:[^'\\\\\\n]|\\\\[^])*'?", BACK = "`(?:[^`\\\\]|\\\\[^])*`?";
const TRIPLE = '"""[^]*?(?:"""|$)|\'\'\'[^]*?(?:\'\'\'|$)';
// A lifetime of Rust begins as a character does.
const CHARACTER = "'(?:[^'\\\\\\n]|\\\\[^'\\n]{1,9}|\\\\')'";
const NUMBER = "(?<![\\w.])(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d[\\d_]*)?(?:[eE][+-]?\\d+)?)\\w*";
const WORD = "[A-Za-z_$][\\w$]*";
const C_WORDS = "auto bool break case char const continue default do double else enum extern false float for goto if inline int "
  + "long return short signed sizeof static struct switch true typedef union unsigned void volatile while";
const JAVA_WORDS = "abstract as async await base boolean break byte case catch char class const continue data default do "
  + "double else enum export extends false final finally float for foreach fun get if implements import in instanceof int "
  + "interface internal is let long namespace native new null object open out override package private protected public "
  + "readonly ref return sealed set short static string super switch synchronized this throw throws transient true try "
  + "typeof using val var virtual void volatile when where while with yield";

/** Languages: [their names, comments, strings, keywords]. */
const LANGUAGES = [
  ["python py python3 pyi", HASH, `(?:\\b[rbfuRBFU]{1,2})?(?:${TRIPLE}|${DOUBLE}|${SINGLE})`,
    "False None True and as assert async await break case class continue def del elif else except finally for from global "
    + "if import in is lambda match nonlocal not or pass raise return try while with yield"],
  ["javascript js jsx mjs typescript ts tsx", SLASHES, `${DOUBLE}|${SINGLE}|${BACK}`,
    "any as async await boolean break case catch class const continue debugger declare default delete do else enum export "
    + "extends false finally for from function get if implements import in instanceof interface keyof let namespace never new "
    + "null number of private protected public readonly return set static string super switch this throw true try type "
    + "typeof undefined unknown var void while with yield"],
  ["c h cpp c++ cc cxx hpp cuda cu glsl", SLASHES, `${DOUBLE}|${CHARACTER}`,
    C_WORDS + " alignas and catch class concept consteval constexpr co_await co_return co_yield decltype delete explicit "
    + "export friend mutable namespace new noexcept not nullptr operator or override private protected public requires "
    + "static_assert template this throw try typename using virtual"],
  ["java kotlin kt csharp cs c# scala dart", SLASHES, `${TRIPLE}|${DOUBLE}|${CHARACTER}`, JAVA_WORDS],
  ["go golang", SLASHES, `${DOUBLE}|${CHARACTER}|${BACK}`,
    "break case chan const continue default defer else fallthrough false for func go goto if import interface iota map nil "
    + "package range return select struct switch true type var"],
  ["rust rs", SLASHES, `${DOUBLE}|${CHARACTER}`,
    "as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub "
    + "ref return self Self static struct super trait true type unsafe use where while"],
  ["swift", SLASHES, `${TRIPLE}|${DOUBLE}`,
    "actor as async await break case catch class continue default defer do else enum extension false for func guard if "
    + "import in init internal is let nil private protocol public repeat return self static struct super switch throw "
    + "throws true try var where while"],
  ["php", `${SLASHES}|${HASH}`, `${DOUBLE}|${SINGLE}`,
    JAVA_WORDS + " array echo elseif empty function global isset match print require require_once trait unset use"],
  ["ruby rb", HASH, `${DOUBLE}|${SINGLE}`,
    "alias and begin break case class def defined do else elsif end ensure false for if in module next nil not or redo "
    + "rescue retry return self super then true undef unless until when while yield"],
  ["bash sh shell zsh console", "(?<![^\\s;])#[^\\n]*", `"(?:[^"\\\\]|\\\\[^])*"?|'[^']*'?`,
    "case do done elif else esac exit export fi for function if in local return set shift then until while"],
  ["sql postgresql mysql sqlite", `${DASHES}|\\/\\*[^]*?(?:\\*\\/|$)`, "'[^']*'?|\"[^\"\\n]*\"?",
    "add all alter and any as asc begin between by case cast check column commit constraint create cross current default "
    + "delete desc distinct drop else end except exists false foreign from full group having if in index inner insert into is "
    + "join key left like limit not null offset on or order outer over partition primary references returning right rollback "
    + "select set table then true union unique update using values view when where with"],
  ["lua", "--\\[\\[[^]*?(?:\\]\\]|$)|" + DASHES, `${DOUBLE}|${SINGLE}|\\[\\[[^]*?(?:\\]\\]|$)`,
    "and break do else elseif end false for function goto if in local nil not or repeat return then true until while"],
  ["r", HASH, `${DOUBLE}|${SINGLE}`, "FALSE NA NULL TRUE break else for function if in next repeat return while"],
  ["json json5 jsonc", SLASHES, `${DOUBLE}|${SINGLE}`, "false null true"],
  ["yaml yml", "(?<!\\S)" + HASH, `${DOUBLE}|${SINGLE}`, "false no null off on true yes"],
  ["toml ini conf dockerfile docker makefile make cmake", HASH, `${TRIPLE}|${DOUBLE}|${SINGLE}`,
    "ADD ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM RUN USER VOLUME WORKDIR else endif endfunction false function if ifeq "
    + "include set true"],
  ["html xml svg vue", "<!--[^]*?(?:-->|$)", '"[^"]*"?|(?<==)\'[^\']*\'?', "", "<[\\/!?]?[A-Za-z][\\w:.-]*|[\\/?]?>"],
  ["css scss less", SLASHES, `${DOUBLE}|${SINGLE}`, "", "@[\\w-]+|![a-z]+"],
];

const KINDS = ["comment", "string", "number", "keyword"];
const languages = new Map();
for (const [names, comment, string, words, keyword] of LANGUAGES) {
  const pattern = new RegExp([comment, string, NUMBER, keyword || WORD].map((one) => `(${one})`).join("|"), "g");
  const language = { pattern, words: keyword ? null : new Set(words.split(" ")), isSql: names.startsWith("sql") };
  for (const name of names.split(" ")) languages.set(name, language);
}

/** Text of a program as nodes. */
function coloured(name, text) {
  const language = languages.get(name.toLowerCase());
  if (!language || text.length > MOST_CODE) return [text];
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(language.pattern)) {
    const kind = match.slice(1).findIndex((group) => group !== undefined);
    const word = language.isSql ? match[0].toLowerCase() : match[0];
    if (!match[0] || (kind === 3 && language.words && !language.words.has(word))) continue;
    nodes.push(text.slice(end, match.index), make("span", KINDS[kind], match[0]));
    end = match.index + match[0].length;
  }
  return [...nodes, text.slice(end)].filter((node) => node !== "");
}

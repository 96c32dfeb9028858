// Code in colours: comments, strings, numbers and keywords, found by one pattern a language.

const LONGEST_HIGHLIGHTED = 20000; // characters of a block; a longer one has no colours
const C_LIKE = { line: "//", block: true, strings: "\"'", words: "" };
const C_WORDS = "auto bool break case char const continue default do double else enum extern float for goto if "
  + "inline int long return short signed sizeof static struct switch typedef union unsigned void volatile while";
const JS_WORDS = "async await break case catch class const continue debugger default delete do else export extends "
  + "false finally for from function get if import in instanceof let new null of return set static super switch "
  + "this throw true try typeof undefined var void while yield";

const LANGUAGES = {
  python: { line: "#", strings: "\"'", triple: true, words: "and as assert async await break case class continue def "
    + "del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise "
    + "return self True try while with yield" },
  javascript: { ...C_LIKE, strings: "\"'`", words: JS_WORDS },
  typescript: { ...C_LIKE, strings: "\"'`", words: `${JS_WORDS} abstract any as boolean declare enum implements interface `
    + "keyof namespace never number private protected public readonly string type unknown" },
  c: { ...C_LIKE, words: C_WORDS },
  cpp: { ...C_LIKE, words: `${C_WORDS} catch class constexpr decltype delete explicit false final friend mutable `
    + "namespace new noexcept nullptr operator override private protected public template this throw true try typename "
    + "using virtual __global__ __device__ __shared__ __host__" },
  csharp: { ...C_LIKE, words: `${C_WORDS} as async await base class decimal delegate event false foreach get in interface `
    + "internal is lock namespace new null object out override params private protected public readonly ref sealed set "
    + "string this throw true try using var virtual where yield" },
  java: { ...C_LIKE, words: "abstract boolean break byte case catch char class continue default do double else enum "
    + "extends false final finally float for if implements import instanceof int interface long native new null package "
    + "private protected public record return short static super switch synchronized this throw throws true try var void "
    + "volatile while" },
  kotlin: { ...C_LIKE, words: "as break by class companion continue data do else false for fun if import in interface is "
    + "null object override package private return super this throw true try typealias val var when while" },
  swift: { ...C_LIKE, words: "actor as associatedtype async await break case catch class continue default defer do else "
    + "enum extension false for func guard if import in init inout is let nil private protocol public repeat return self "
    + "static struct super switch throw throws true try typealias var where while" },
  go: { ...C_LIKE, strings: "\"'`", words: "break case chan const continue default defer else fallthrough false for func "
    + "go goto if import interface map nil package range return select struct switch true type var" },
  rust: { ...C_LIKE, strings: "\"", words: "as async await break const continue crate dyn else enum extern false fn for "
    + "if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use "
    + "where while" },
  php: { ...C_LIKE, words: "abstract array as break case catch class const continue echo else elseif extends false final "
    + "fn for foreach function global if implements interface namespace new null private protected public return static "
    + "switch this throw trait true try use var while" },
  bash: { line: "#", strings: "\"'", words: "case do done elif else esac export fi for function if in local return set "
    + "shift then until while" },
  ruby: { line: "#", strings: "\"'", words: "begin break case class def do else elsif end ensure false for if in module "
    + "next nil not or raise redo require rescue retry return self super then true unless until when while yield" },
  lua: { line: "--", strings: "\"'", words: "and break do else elseif end false for function goto if in local nil not or "
    + "repeat return then true until while" },
  r: { line: "#", strings: "\"'", words: "break else FALSE for function if in NA next NULL repeat return TRUE while" },
  haskell: { line: "--", strings: "\"", words: "case class data deriving do else if import in infix instance let module "
    + "newtype of then type where" },
  sql: { line: "--", block: true, strings: "'\"", ignoresCase: true, words: "all alter and as asc begin between by case "
    + "commit create delete desc distinct drop else end exists from full group having in index inner insert into is join "
    + "key left like limit not null on or order outer primary references right select set table then union unique update "
    + "values view when where with" },
  ptx: { ...C_LIKE, words: "add and atom bar bra call cvt cvta div ex2 fma ld ldmatrix mad max membar min mma mov mul neg "
    + "not or red rem ret rcp selp setp shfl shl shr st sub wgmma xor" },
  css: { block: true, strings: "\"'", words: "" },
  json: { strings: "\"", words: "true false null" },
  yaml: { line: "#", strings: "\"'", words: "true false null yes no" },
  toml: { line: "#", strings: "\"'", words: "true false" },
  html: { markup: true },
  diff: { diff: true },
};
const ALIASES = {
  py: "python", python3: "python", js: "javascript", jsx: "javascript", mjs: "javascript", ts: "typescript",
  tsx: "typescript", h: "c", "c++": "cpp", cc: "cpp", cu: "cpp", cuda: "cpp", hpp: "cpp", cs: "csharp", "c#": "csharp",
  kt: "kotlin", golang: "go", rs: "rust", sh: "bash", shell: "bash", zsh: "bash", console: "bash", rb: "ruby",
  hs: "haskell", postgresql: "sql", mysql: "sql", sqlite: "sql", scss: "css", jsonc: "json", yml: "yaml", xml: "html",
  svg: "html", vue: "html", patch: "diff",
};

const quoted = (text) => text.replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&");
const patterns = new Map(); // by language

// Groups: comment, string, number, keyword; another name is passed over whole.
function patternOf(name) {
  if (patterns.has(name)) return patterns.get(name);
  const { line, block, strings, triple, words, ignoresCase } = LANGUAGES[name];
  const never = "(?!)";
  const comment = [line && `${quoted(line)}[^\\n]*`, block && "/\\*[^]*?(?:\\*/|$)"].filter(Boolean).join("|");
  const quotes = [...strings].map((q) => `${q}(?:[^${q}\\\\${q === "`" ? "" : "\\n"}]|\\\\[^])*${q}?`);
  if (triple) quotes.unshift('"""[^]*?(?:"""|$)', "'''[^]*?(?:'''|$)");
  const pattern = new RegExp(
    `(${comment || never})|(${quotes.join("|")})|\\b(0[xXbB][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b`
    + `|\\b(${words.split(" ").filter(Boolean).join("|") || never})\\b|[A-Za-z_]\\w*`,
    ignoresCase ? "gi" : "g",
  );
  patterns.set(name, pattern);
  return pattern;
}

const KINDS = ["comment", "string", "number", "keyword"];
const MARKUP = /(<!--[^]*?(?:-->|$))|("[^"\n]*"|'[^'\n]*')|(?!)()|(<\/?[\w:-]+|\/?>)/g;

function highlight(code, label, parent) {
  const name = ALIASES[label] ?? label;
  const language = Object.hasOwn(LANGUAGES, name) && code.length <= LONGEST_HIGHLIGHTED ? LANGUAGES[name] : null;
  if (!language) {
    parent.append(code);
  } else if (language.diff) {
    for (const line of code.split(/(?<=\n)/)) {
      const kind = line.startsWith("@@") ? "keyword" : { "+": "inserted", "-": "deleted" }[line[0]];
      if (kind) element("span", parent, line, kind);
      else parent.append(line);
    }
  } else {
    let end = 0;
    for (const match of code.matchAll(language.markup ? MARKUP : patternOf(name))) {
      const kind = KINDS.find((_, at) => match[at + 1] !== undefined);
      if (!kind || !match[0]) continue;
      parent.append(code.slice(end, match.index));
      element("span", parent, match[0], kind);
      end = match.index + match[0].length;
    }
    parent.append(code.slice(end));
  }
}

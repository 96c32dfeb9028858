// LaTeX's common part as MathML, which browsers draw themselves. What is unknown is shown as it is written.

const LONGEST_FORMULA = 5000, DEEPEST_FORMULA = 40;

const table = (text) => new Map(text.trim().split(/\s+/).map((row) => {
  const at = row.indexOf(":");
  return [row.slice(0, at), row.slice(at + 1)];
}));
const LETTERS = table(`
  alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ lambda:λ mu:μ
  nu:ν xi:ξ omicron:ο pi:π varpi:ϖ rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ omega:ω
  Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω hbar:ℏ ell:ℓ Re:ℜ Im:ℑ aleph:ℵ
  infty:∞ partial:∂ nabla:∇ emptyset:∅ varnothing:∅ imath:ı jmath:ȷ top:⊤ bot:⊥ angle:∠ degree:° prime:′ ldots:… dots:…
  dotsc:… dotsb:⋯ cdots:⋯ vdots:⋮ ddots:⋱ checkmark:✓ square:□ blacksquare:■ triangle:△ wp:℘`);
const OPERATORS = table(`
  times:× cdot:⋅ div:÷ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ ominus:⊖ otimes:⊗ odot:⊙ wedge:∧ land:∧ vee:∨
  lor:∨ cap:∩ cup:∪ setminus:∖ le:≤ leq:≤ leqslant:⩽ ge:≥ geq:≥ geqslant:⩾ ll:≪ gg:≫ ne:≠ neq:≠ equiv:≡ approx:≈ sim:∼
  simeq:≃ cong:≅ propto:∝ prec:≺ succ:≻ in:∈ notin:∉ ni:∋ subset:⊂ subseteq:⊆ supset:⊃ supseteq:⊇ forall:∀ exists:∃
  nexists:∄ neg:¬ lnot:¬ to:→ rightarrow:→ longrightarrow:⟶ leftarrow:← gets:← leftrightarrow:↔ Rightarrow:⇒
  implies:⟹ Longrightarrow:⟹ Leftarrow:⇐ impliedby:⟸ Leftrightarrow:⇔ iff:⟺ mapsto:↦ uparrow:↑ downarrow:↓ perp:⊥
  parallel:∥ mid:∣ nmid:∤ vdash:⊢ models:⊨ therefore:∴ because:∵ coloneqq:≔ triangleq:≜ hookrightarrow:↪ colon::
  rightleftharpoons:⇌ lVert:‖ rVert:‖ Vert:‖ lvert:| rvert:| vert:| langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉
  lbrace:{ rbrace:} backslash:\\`);
const LARGE = table(`
  sum:∑ prod:∏ coprod:∐ bigcup:⋃ bigcap:⋂ bigoplus:⨁ bigotimes:⨂ bigvee:⋁ bigwedge:⋀`);
const INTEGRALS = table("int:∫ iint:∬ iiint:∭ oint:∮");
const FUNCTIONS = new Set(("arccos arcsin arctan arg cos cosh cot coth csc deg det dim exp gcd hom ker lg ln log sec sin "
  + "sinh tan tanh Pr").split(" "));
const LIMITS = new Set("lim liminf limsup max min sup inf argmax argmin".split(" "));
const ACCENTS = table("hat:^ widehat:^ tilde:~ widetilde:~ bar:¯ overline:¯ vec:→ dot:˙ ddot:¨ overrightarrow:→ "
  + "check:ˇ breve:˘");
const FONTS = table("mathbb:double-struck mathbf:bold boldsymbol:bold bm:bold mathcal:script mathscr:script "
  + "mathfrak:fraktur mathsf:sans-serif mathtt:monospace mathit:italic");
// Where the styled alphabets of Unicode begin: upper case, lower case, digits; and letters that stand elsewhere.
const ALPHABETS = {
  "double-struck": [0x1d538, 0x1d552, 0x1d7d8, "C:ℂ H:ℍ N:ℕ P:ℙ Q:ℚ R:ℝ Z:ℤ"],
  bold: [0x1d400, 0x1d41a, 0x1d7ce, ""],
  script: [0x1d49c, 0x1d4b6, 0, "B:ℬ E:ℰ F:ℱ H:ℋ I:ℐ L:ℒ M:ℳ R:ℛ e:ℯ g:ℊ o:ℴ"],
  fraktur: [0x1d504, 0x1d51e, 0, "C:ℭ H:ℌ I:ℑ R:ℜ Z:ℨ"],
  "sans-serif": [0x1d5a0, 0x1d5ba, 0x1d7e2, ""],
  monospace: [0x1d670, 0x1d68a, 0x1d7f6, ""],
  italic: [0x1d434, 0x1d44e, 0, "h:ℎ"],
};
const SPACES = table("quad:1em qquad:2em ,:.17em ::.22em ;:.28em !:-.17em enspace:.5em thinspace:.17em");
const TEXTS = new Set("text textrm textbf textit textsf texttt mathrm operatorname mbox".split(" "));
const FENCES = { matrix: "", pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{ " };
const ALIGNED = new Set("align aligned alignat eqnarray split gather gathered equation".split(" "));

function mathNode(tag, children = [], attributes = {}) {
  const node = document.createElementNS("http://www.w3.org/1998/Math/MathML", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...(typeof children === "string" ? [children] : children));
  return node;
}

const grouped = (nodes) => (nodes.length === 1 ? nodes[0] : mathNode("mrow", nodes));

function styledText(text, font) {
  const [upper, lower, digits, others] = ALPHABETS[font];
  const elsewhere = table(others || ":");
  return [...text].map((c) => {
    const first = c >= "A" && c <= "Z" ? [upper, "A"] : c >= "a" && c <= "z" ? [lower, "a"]
      : c >= "0" && c <= "9" ? [digits, "0"] : [0];
    if (elsewhere.has(c)) return elsewhere.get(c);
    return first[0] ? String.fromCodePoint(first[0] + c.charCodeAt(0) - first[1].charCodeAt(0)) : c;
  }).join("");
}

class Formula {
  constructor(source, isDisplay) {
    this.tokens = source.match(/\\[a-zA-Z]+\*?|\\[^]|\d+(?:\.\d+)?|\s+|[^]/gu) ?? [];
    this.at = 0;
    this.depth = 0;
    this.isDisplay = isDisplay;
  }

  peek() {
    while (/^\s/.test(this.tokens[this.at] ?? "")) this.at++;
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    this.at++;
    return token;
  }

  take(token) {
    if (this.peek() !== token) return false;
    this.at++;
    return true;
  }

  // Up to one of the tokens that end it, which stays.
  row(ends = []) {
    if (++this.depth > DEEPEST_FORMULA) throw new Error("too deep");
    const nodes = [];
    for (let token; (token = this.peek()) !== undefined && !ends.includes(token);) nodes.push(this.scripted());
    this.depth--;
    return nodes;
  }

  // {...}, or one token.
  argument() {
    if (!this.take("{")) return this.peek() === undefined ? mathNode("mrow") : this.atom();
    const nodes = this.row(["}"]);
    this.take("}");
    return grouped(nodes);
  }

  // The text of {...} as it is written.
  raw() {
    if (!this.take("{")) return this.next() ?? "";
    let text = "";
    for (let open = 1; this.at < this.tokens.length; this.at++) {
      const token = this.tokens[this.at];
      open += (token === "{") - (token === "}");
      if (!open) break;
      text += token;
    }
    this.at++;
    return text;
  }

  // An atom with what stands above and below it.
  scripted() {
    const base = this.atom();
    let low = null, high = null;
    for (;;) {
      if (!low && this.take("_")) low = this.argument();
      else if (!high && this.take("^")) high = this.argument();
      else if (!high && this.peek() === "'") {
        let primes = "";
        while (this.take("'")) primes += "′";
        high = mathNode("mo", primes);
      } else break;
    }
    if (!low && !high) return base;
    const isBelow = base.isOver || (this.isDisplay && base.hasLimits);
    const names = isBelow ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    const name = names[low && high ? 2 : high ? 1 : 0];
    return mathNode(name, [base, low, high].filter(Boolean));
  }

  atom() {
    const token = this.next();
    if (token === "{") {
      const nodes = this.row(["}"]);
      this.take("}");
      return mathNode("mrow", nodes);
    }
    if (token[0] === "\\" && token.length > 1) return this.command(token.slice(1).replace(/\*$/, ""));
    if (/^\d/.test(token)) return mathNode("mn", token);
    if (/^\p{L}/u.test(token)) return mathNode("mi", token);
    if (token === "~") return mathNode("mspace", [], { width: ".3em" });
    if ("^_}".includes(token)) return mathNode("mrow");
    return mathNode("mo", { "-": "−", "*": "∗" }[token] ?? token, "()[]|".includes(token) ? { stretchy: "false" } : {});
  }

  command(name) {
    if (LETTERS.has(name)) return mathNode("mi", LETTERS.get(name));
    if (OPERATORS.has(name)) return mathNode("mo", OPERATORS.get(name), { stretchy: "false" });
    if (LARGE.has(name) || INTEGRALS.has(name)) {
      const node = mathNode("mo", LARGE.get(name) ?? INTEGRALS.get(name), { largeop: "true" });
      node.hasLimits = LARGE.has(name);
      return node;
    }
    if (FUNCTIONS.has(name) || LIMITS.has(name)) {
      const node = mathNode("mi", name);
      node.hasLimits = LIMITS.has(name);
      return node;
    }
    if (SPACES.has(name)) return mathNode("mspace", [], { width: SPACES.get(name) });
    if (TEXTS.has(name)) return mathNode("mtext", this.raw().replace(/ /g, "\u00a0"));
    if (FONTS.has(name)) return mathNode("mi", styledText(this.raw(), FONTS.get(name)), { mathvariant: "normal" });
    if (ACCENTS.has(name)) {
      const over = mathNode("mo", ACCENTS.get(name), { stretchy: String(/^(wide|over)/.test(name)) });
      return mathNode("mover", [this.argument(), over], { accent: "true" });
    }
    const known = COMMANDS[name];
    if (known && Object.hasOwn(COMMANDS, name)) return known(this);
    if ("{}%$#&_|".includes(name)) return mathNode("mo", name === "|" ? "‖" : name, { stretchy: "false" });
    if (name === "\\" || name === " ") return mathNode("mspace", [], { width: ".3em" });
    return mathNode("mtext", `\\${name}`, { class: "unknown" });
  }

  delimiter() {
    const token = this.next() ?? ".";
    if (token === ".") return "";
    return OPERATORS.get(token.slice(1)) ?? (token === "\\|" ? "‖" : token.replace("\\", ""));
  }

  // Rows of cells up to \end{name}.
  rows(name) {
    const isAligned = ALIGNED.has(name), isCases = name === "cases";
    const rows = [[]];
    for (let token; (token = this.peek()) !== undefined && token !== "\\end";) {
      rows.at(-1).push(mathNode("mtd", this.row(["&", "\\\\", "\\end"])));
      if (this.take("\\\\")) {
        if (this.take("[")) while (this.peek() !== undefined && !this.take("]")) this.at++;
        rows.push([]);
      } else this.take("&");
    }
    this.take("\\end");
    this.raw();
    const grid = mathNode("mtable", rows.filter((row) => row.length).map((row) => mathNode("mtr", row)),
      isAligned ? { class: "aligned", displaystyle: "true" } : isCases ? { class: "cases" } : {});
    const [open, close] = [...(FENCES[name] ?? "")];
    return open ? mathNode("mrow", [mathNode("mo", open), grid, mathNode("mo", (close ?? "").trim())]) : grid;
  }
}

const fraction = (attributes = {}) => (f) => mathNode("mfrac", [f.argument(), f.argument()], attributes);
const styled = (attributes) => (f) => mathNode("mstyle", f.row(["}", "&", "\\\\", "\\end", "\\right"]), attributes);
const ignored = () => mathNode("mrow");
const ignoring = (f) => {
  f.raw();
  return mathNode("mrow");
};
const over = (mark) => (f) => {
  const node = mathNode("mover", [f.argument(), mathNode("mo", mark)]);
  node.isOver = true;
  return node;
};

const COMMANDS = {
  frac: fraction(), tfrac: fraction({ displaystyle: "false" }), dfrac: fraction({ displaystyle: "true" }),
  cfrac: fraction({ displaystyle: "true" }),
  binom: (f) => mathNode("mrow", [mathNode("mo", "("), fraction({ linethickness: "0" })(f), mathNode("mo", ")")]),
  sqrt: (f) => {
    if (!f.take("[")) return mathNode("msqrt", [f.argument()]);
    const index = grouped(f.row(["]"]));
    f.take("]");
    return mathNode("mroot", [f.argument(), index]);
  },
  left: (f) => {
    const open = f.delimiter();
    const nodes = [mathNode("mo", open)];
    for (;;) {
      nodes.push(...f.row(["\\right", "\\middle"]));
      if (!f.take("\\middle")) break;
      nodes.push(mathNode("mo", f.delimiter()));
    }
    f.take("\\right");
    return mathNode("mrow", [...nodes, mathNode("mo", f.delimiter())]);
  },
  begin: (f) => {
    const name = f.raw().replace("*", "");
    if (name === "array" || name === "alignat") f.raw();
    return f.rows(name);
  },
  overset: (f) => {
    const high = f.argument();
    return mathNode("mover", [f.argument(), high]);
  },
  underset: (f) => {
    const low = f.argument();
    return mathNode("munder", [f.argument(), low]);
  },
  underline: (f) => mathNode("munder", [f.argument(), mathNode("mo", "_")]),
  overbrace: over("⏞"),
  underbrace: (f) => {
    const node = mathNode("munder", [f.argument(), mathNode("mo", "⏟")]);
    node.isOver = true;
    return node;
  },
  boxed: (f) => mathNode("mrow", [f.argument()], { class: "boxed" }),
  phantom: (f) => mathNode("mphantom", [f.argument()]),
  pmod: (f) => mathNode("mrow", [mathNode("mtext", " (mod "), f.argument(), mathNode("mo", ")")]),
  bmod: () => mathNode("mo", "mod"), mod: () => mathNode("mo", "mod"),
  not: (f) => mathNode("mo", `${f.atom().textContent}\u0338`),
  tag: (f) => mathNode("mtext", ` (${f.raw()})`),
  color: ignoring, label: ignoring, displaystyle: styled({ displaystyle: "true" }),
  textstyle: styled({ displaystyle: "false" }), limits: ignored, nolimits: ignored, nonumber: ignored, notag: ignored,
  big: ignored, Big: ignored, bigg: ignored, Bigg: ignored, bigl: ignored, bigr: ignored, Bigl: ignored, Bigr: ignored,
};
COMMANDS.stackrel = COMMANDS.overset;
COMMANDS.dbinom = COMMANDS.tbinom = COMMANDS.binom;

function formula(source, isDisplay, parent) {
  try {
    if (source.length > LONGEST_FORMULA) throw new Error("too long");
    const reader = new Formula(source, isDisplay);
    const nodes = [];
    while (reader.peek() !== undefined) nodes.push(...reader.row(), ...(reader.peek() === undefined ? [] : [reader.atom()]));
    parent.append(mathNode("math", [mathNode("mrow", nodes)], isDisplay ? { display: "block" } : {}));
  } catch {
    element("code", parent, source);
  }
}

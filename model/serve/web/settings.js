// The settings of a request. What nobody set here is as the server was started.

const PLAIN = ["system", "limit", "stop", "thinking", "tools", "schema", "key"];
const LABELS = { // of the server's sampling settings; another one is shown by its name
  temperature: "Temperature (0 is greedy)", top_k: "Top k (0: all)", top_p: "Top p (1: all)", min_p: "Min p (0: all)",
  repeat_penalty: "Repetition penalty (1: off)", repeat_last_n: "Tokens it looks back on (-1: all)",
  presence_penalty: "Presence penalty (0: off)", frequency_penalty: "Frequency penalty (0: off)", seed: "Seed",
  min_tokens: "Tokens at least",
};
const isSampling = (name, value) => name !== "n_predict" && (name in LABELS || typeof value === "number");

// Use the storage of a setting; the key's outlives a reload only. A browser may refuse: null.
function inStorage(id, use) {
  try {
    return use(id === "key" ? sessionStorage : localStorage);
  } catch {
    return null;
  }
}

function remember(id) {
  const field = byId(id);
  field.value = inStorage(id, (storage) => storage.getItem(id)) ?? field.value;
  field.addEventListener("change", () => {
    inStorage(id, (storage) => (field.value === "" ? storage.removeItem(id) : storage.setItem(id, field.value)));
  });
}

// A field for each sampling setting of the server, with its default.
function showSampling(params) {
  const box = byId("sampling");
  const wanted = Object.entries({ ...params, seed: null }).filter(([name, value]) => isSampling(name, value));
  for (const [name, value] of wanted) {
    if (!byId(name)) {
      const field = element("input", element("label", box, LABELS[name] ?? name));
      field.id = name;
      field.type = "number";
      field.step = "any";
      remember(name);
    }
    byId(name).placeholder = value === null ? "" : String(Number(value.toPrecision(6)));
  }
  byId("seed").placeholder = "a new one each time";
  byId("limit").placeholder = params.n_predict > 0 ? String(params.n_predict) : "no limit";
}

function resetSettings() {
  for (const field of byId("settings").querySelectorAll("input, textarea, select")) {
    if (field.id === "key") continue;
    field.value = "";
    field.dispatchEvent(new Event("change"));
  }
}

// The JSON of a field. Throws an Error that names it.
function jsonOf(id, words) {
  const text = byId(id).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${words} in the settings: ${error.message}`);
  }
}

function settingsOfRequest() {
  const body = {};
  for (const field of byId("sampling").querySelectorAll("input")) {
    if (field.value !== "" && Number.isFinite(field.valueAsNumber)) body[field.id] = field.valueAsNumber;
  }
  const limit = byId("limit").valueAsNumber;
  if (limit > 0) body.max_tokens = limit;
  const stop = byId("stop").value.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  const thinking = byId("thinking").value;
  if (thinking) body.chat_template_kwargs = { enable_thinking: thinking === "on" };
  const tools = jsonOf("tools", "Tools");
  if (tools) {
    body.tools = (Array.isArray(tools) ? tools : [tools]).map((tool) =>
      (tool.function ? tool : { type: "function", function: tool }));
  }
  const schema = jsonOf("schema", "The schema");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return body;
}

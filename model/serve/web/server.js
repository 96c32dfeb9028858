// What the server is asked.

function headers() {
  const key = byId("key").value;
  const auth = key ? { Authorization: `Bearer ${key}` } : {};
  return { "Content-Type": "application/json", ...auth };
}

// Why a response is an error; a proxy's are no JSON.
async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

async function codeOf(response) {
  return response.json().then(({ error }) => error.code, () => null);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6)); // others are comments
    }
  }
}

// Ask for an answer; `onDelta` gets what comes. Returns {usage, timings, finish}.
async function complete(body, signal, onDelta) {
  const response = await fetch("v1/chat/completions",
    { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) throw new Error(await reason(response));
  const end = { usage: null, timings: null, finish: null };
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    end.usage = event.usage ?? end.usage;
    end.timings = event.timings ?? end.timings;
    end.finish = choice?.finish_reason ?? end.finish;
    if (choice?.delta) onDelta(choice.delta);
  }
  return end;
}

// {model, models, props}, `LOADING` while the one model is loaded, or null if the server does not tell. `models` are
// those to choose from, if there are several, and `model` is the one of them that is `wanted`, is loaded, or is the first.
const LOADING = {};
async function describe(wanted) {
  const listed = await fetch("v1/models", { headers: headers() });
  if (listed.status === 401) byId("settings").showModal(); // it has the field for the key
  if (!listed.ok) return (await codeOf(listed)) === "loading" ? LOADING : null;
  const { data } = await listed.json();
  if (!data.length) return null;
  const models = data.length > 1 ? data.filter((each) => each.status) : []; // one model's names have none
  const model = models.find(({ id }) => id === wanted) ?? models.find(({ status }) => status.value === "loaded") ?? data[0];
  const query = models.length ? `?model=${encodeURIComponent(model.id)}` : "";
  const props = await fetch(`props${query}`, { headers: headers() });
  return { model, models, props: props.ok ? await props.json() : null };
}

// Conversations in the browser's own database; without one they last as long as the page.

const database = new Promise((resolve) => {
  try {
    const request = indexedDB.open("urdir", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => resolve(null);
  } catch {
    resolve(null);
  }
});

// Other tabs get what is kept here: each writes whole conversations, and would write over theirs.
const tabs = (() => {
  try {
    return new BroadcastChannel("urdir");
  } catch {
    return null;
  }
})();

async function inStore(mode, use) {
  const opened = await database;
  if (!opened) return undefined;
  return new Promise((resolve, reject) => {
    const transaction = opened.transaction("conversations", mode);
    const request = use(transaction.objectStore("conversations"));
    transaction.commit?.(); // also if the page is left now
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

const keptConversations = async () => (await inStore("readonly", (store) => store.getAll())) ?? [];

// Store a conversation; one without messages is deleted.
async function keep(conversation) {
  const { id, nodes } = conversation;
  tabs?.postMessage(conversation);
  try {
    await inStore("readwrite", (store) => (Object.keys(nodes).length ? store.put(conversation) : store.delete(id)));
  } catch (error) {
    say(`This conversation cannot be kept: ${error?.message ?? "the browser refuses"}`, true);
  }
}

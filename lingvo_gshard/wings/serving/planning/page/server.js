// Talks to the server.

async function call(path, body) {
  const options = body ? { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) } : {};
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer.");
  }
  const value = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(value.error?.message || `Status ${response.status}`);
  return value;
}

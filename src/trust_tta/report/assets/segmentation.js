// Labels before and after the update: the handle divides them.
for (const input of document.querySelectorAll(".halves input")) {
  const cut = () => input.parentElement.style.setProperty("--cut", `${input.value}%`);
  input.addEventListener("input", cut);
  cut();
}
